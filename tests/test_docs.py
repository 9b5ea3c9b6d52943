"""The documentation says what the code does: it is run, generated, and followed link by link."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

import kda_jit
from kda_jit.backends.base import Query
from kda_jit.errors import InputError
from kda_jit.jit.compiler import unavailable_reason
from kda_jit.resolver import ORDER, rejections

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def generate():
    pytest.importorskip("typer", reason="docs/cli.md is made from the commands: needs typer")
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_in_readme_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    scope = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["out"].shape == scope["v"].shape
    assert scope["final_state"].shape == (4, 2, 128, 128)
    assert capsys.readouterr().out.strip().endswith(kda_jit.last_launch().backend)


def test_generated_pages_are_up_to_date(generate):
    stale = [path.name for path, text in generate.pages().items() if path.read_text() != text]
    assert not stale, "run `make docs`"


def test_every_setting_and_command_is_documented(generate):
    from kda_jit import settings
    from kda_jit.cli import describe

    variables = {s.name for s in settings.SETTINGS}
    page = (ROOT / "docs" / "environment.md").read_text()
    assert set(re.findall(r"KDA_JIT_\w+", page)) == variables
    page = (ROOT / "docs" / "cli.md").read_text()
    commands = describe()
    assert re.findall(r"^## `kda-jit (.*)`$", page, re.M) == [c.usage for c in commands]
    for command in commands:
        assert len(command.help) > 20, f"{command.usage} has no help"
        for option in command.options:
            assert option.help, f"{command.usage}: {option.names} has no help"


def test_variables_and_commands_named_in_the_pages_exist(generate):
    from kda_jit import settings
    from kda_jit.cli import describe

    variables = {s.name for s in settings.SETTINGS}
    commands = {c.usage.split()[0] for c in describe()}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        text = page.read_text()
        assert set(re.findall(r"KDA_JIT_[A-Z_]+[A-Z]", text)) <= variables, page
        assert set(re.findall(r"`(?:kda-jit|python -m kda_jit) ([a-z]+)", text)) <= commands, page
        named = {
            m
            for code in re.findall(r"`([^`\n]+)`", text)
            for m in re.findall(r"^make ([\w-]+)", code)
        }
        assert named <= targets, page


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert not missing


def test_layer_map_names_what_is_there():
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "AGENTS.md").read_text(), re.M)
    assert "reference.py" in rows
    assert [r for r in rows if not ((ROOT / r).exists() or (ROOT / "kda_jit" / r).exists())] == []


RUN = {
    "gpu": "H200",
    "date": "2026-01-02",
    "commit": "1a2b3c4",
    "conditions": "L2 cold",
    "rows": [{"case": "one", "us": 412.4, "vs_fla": 1.94}, {"case": "two", "us": 5.25}],
}


def test_readme_has_no_table_without_a_run_file(generate, tmp_path):
    text = f"before\n{generate.BEGIN}\nstale | 1\n{generate.END}\nafter"
    assert generate.readme(text, tmp_path) == f"before\n{generate.BEGIN}\n{generate.END}\nafter"


def test_readme_table_is_the_newest_run_of_each_gpu(generate, tmp_path):
    old = RUN | {"date": "2025-12-31", "rows": [{"case": "one", "us": 999.0}]}
    other = RUN | {"gpu": "RTX 4090"}
    for name, run in [("h200-b", old), ("h200-a", RUN), ("rtx4090", other)]:
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    section = generate.bench_section(tmp_path)
    assert "999" not in section
    assert (
        "H200, L2 cold; commit 1a2b3c4, 2026-01-02 ([run file](benchmarks/results/h200-a.json))"
        in section
    )
    assert "RTX 4090" in section
    assert (
        "| case | us | vs fla |\n|---|---:|---:|\n| `one` | 412 | 1.94x |\n| `two` | 5.2 |  |"
        in section
    )


def test_a_file_that_is_no_run_file_is_refused(generate, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InputError, match=r"x\.json, which lacks commit, date, gpu, rows"):
        generate.bench_section(tmp_path)


def test_page_of_benchmarks_shows_the_newest_run_of_the_same_cases_and_lists_all(
    generate, tmp_path
):
    def saved(name, **change):
        more = {"peers": {"fla": "1"}, "device": {}, "versions": {}, "copy_tb_per_s": 4.0}
        summary = {"vs_fla": {"geomean": 1.94, "least": 1.5, "cases": 1}}
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        found = RUN | more | {"accuracy": [], "summary": summary, "command": "kda-jit bench"}
        path.write_text(json.dumps(found | change))

    saved("a")
    saved("b", date="2025-12-31", rows=[RUN["rows"][0] | {"us": 999.0}, RUN["rows"][1]])
    saved("suites/c", rows=[{"case": "long", "us": 77.7}], summary={})
    errors = {"cuda": {"out": 0.0017, "state": 0.0004}}
    tabled = [{"case": "t", "about": "g = -8", "rounding": 0.0017, "errors": errors}]
    saved("d", date="2025-12-30", rows=[], accuracy=tabled, summary={})
    page = generate.benchmarks(tmp_path)
    assert "999" not in page
    assert (
        "## H200, 2 cases\n\nFrom [a.json](../benchmarks/results/a.json); `kda-jit bench`." in page
    )
    assert "<!-- pictures of a.json -->" in page
    assert "<!-- pictures of suites/c.json -->" in page
    assert page.count("<!-- pictures of") == 2
    assert "| long | 77.7 |" in page
    assert "Speed against fla: 1.94x as geometric mean of 1 cases, 1.50x at least." in page
    assert "| g = -8 | 0.0017 / 0.0004 | 0.0017 |" in page
    assert "final state. From [d.json]" in page
    listed = re.findall(r"^\| \[(\S+)\]", page, re.M)
    assert listed == ["suites/c.json", "a.json", "b.json", "d.json"]
    assert "c.json" not in generate.bench_section(tmp_path), "README is made from whole suites"


def test_conformance_page_shows_the_newest_report_of_each_subject_and_device(generate, tmp_path):
    from kda_jit.testing import verify
    from kda_jit.testing.laws import LAWS
    from kda_jit.testing.runner import Runner

    runner = Runner("torch", torch.device("cpu"))
    report = verify.verify(runner, laws=["split"], regimes=["slow"], examples=1)
    for name, date, subject in [
        ("a", "2026-01-02", "torch"), ("b", "2026-01-01", "torch"), ("c", "2026-01-01", "other"),
    ]:  # fmt: skip
        path = tmp_path / f"conformance-{name}.json"
        verify.save(report, path)
        run = json.loads(path.read_text()) | {"date": date, "subject": subject}
        path.write_text(json.dumps(run))
    page = generate.conformance(tmp_path)
    assert "### torch on CPU: every law holds" in page
    assert "### other on CPU: every law holds" in page
    assert "conformance-a.json" in page
    assert "conformance-b.json" not in page
    assert [name for name in LAWS if f"| `{name}` |" not in page] == []
    assert generate.bench_section(tmp_path) == "", "a report of laws is no run of benchmarks"


def test_conformance_page_without_reports_has_the_laws_alone(generate, tmp_path):
    page = generate.conformance(tmp_path)
    assert "## Faults that the laws notice" in page
    assert "## Found" not in page


def cells(backend):
    """The row of a backend in README's table of what runs where, without its name."""
    (row,) = re.findall(rf"^\| `{backend}`.*$", (ROOT / "README.md").read_text(), re.M)
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


@pytest.mark.skipif(
    unavailable_reason("sm_80") is not None, reason="no NVRTC: cuda rejects every call"
)
@pytest.mark.parametrize("backend", ORDER)
def test_support_table_is_what_the_backends_answer(backend):
    gpu, dtypes, dims, gates, _ = cells(backend)

    def runs(**changes):
        facts = {"K": 128, "dtype": torch.bfloat16, "lower_bound": -5.0, "capability": (9, 0)}
        facts |= changes
        facts.setdefault("V", facts["K"])
        place = torch.device("cuda:0" if facts["capability"] else "cpu")
        return not rejections(backend, Query(**facts, device=place))

    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    names["fp64"] = torch.float64
    assert [n for n in names if runs(dtype=names[n])] == dtypes.split(", ")
    assert [n for n, b in [("bounded", -5.0), ("unbounded", None)] if runs(lower_bound=b)] == (
        re.findall(r"\b(?:un)?bounded", gates)
    )
    assert runs(capability=None) == ("CPU" in gpu)
    if majors := [int(major) for major in re.findall(r"(\d+)\.", gpu)]:
        of_each = {8: (8, 0), 9: (9, 0), 10: (10, 0), 11: (11, 0), 12: (12, 0)}
        assert [m for m, cc in of_each.items() if runs(capability=cc)] == majors
    if dims == "any":
        assert runs(K=1)
        assert runs(K=1024)
    else:
        low, high = int(re.findall(r"\d+", dims)[0]), int(re.findall(r"\d+", dims)[-1])
        assert runs(K=low)
        assert runs(K=high)
        assert not runs(K=low - 1)
        assert not runs(K=high + 1)
