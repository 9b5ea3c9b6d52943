"""`python -m kda_jit.bench`: the command `kda-jit bench`."""

import sys

from kda_jit.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
