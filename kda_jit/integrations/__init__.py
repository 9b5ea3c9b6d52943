"""Stand-ins for other packages, each a module that is imported by name and touches nothing else."""
