"""The workflow of the continuous integration and the citation file follow their schemas, and run what exists."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks.report import ROOT
from tests.tools import versions

pytest.importorskip("check_jsonschema", reason="needs check-jsonschema, which the test extra has")
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"


@pytest.mark.parametrize(
    ("path", "schema"), [(WORKFLOW, "github-workflows"), (ROOT / "CITATION.cff", "citation-file-format")]
)
def test_file_follows_its_schema(path, schema, tmp_path):
    def check(file):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    done = check(path)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / path.name
    broken.write_text(path.read_text(encoding="utf-8").replace("jobs:", "job:").replace("title:", "titel:"))
    assert check(broken).returncode == 1


def test_the_workflow_runs_what_the_makefile_has():
    import ruamel.yaml

    workflow = ruamel.yaml.YAML(typ="safe").load(WORKFLOW)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = [command.split()[1] for command in commands]
    assert targets == ["test", "test-versions", "docs"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    matrix = workflow["jobs"]["versions"]["strategy"]["matrix"]
    assert tuple(matrix["python"]) == versions.PYTHONS
    assert f'requires-python = ">={versions.PYTHONS[0]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
