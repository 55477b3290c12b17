"""What an installation without the repository has."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tidectl import profiles
from tidectl.evals.texts import FILE

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('wheel')"


def test_the_bundled_profiles_are_found_from_a_wheel(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    for package in ("kernels", "packers", "profiles", "tidectl", "tided", "units"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    (source / "wheel").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True, timeout=120)
    [wheel] = (source / "wheel").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)

    command = [sys.executable, "-m", "tidectl.main", "profile", "list", "--json"]
    listed = subprocess.run(
        command, cwd=site, env={**os.environ, "PYTHONPATH": str(site)}, check=True, capture_output=True, timeout=60
    )
    found = {row["name"]: Path(row["path"]) for row in json.loads(listed.stdout)["profiles"]}
    assert found == {name: site / "profiles" / f"{name}.toml" for name in profiles.bundled()}
    assert found
    assert (site / "profiles" / "seeds" / "ds41-mxfp4.json").is_file()
    assert (site / "tidectl" / "evals" / "heldout.jsonl").read_bytes() == FILE.read_bytes()
    bundled = {path.name for path in (ROOT / "units").iterdir()}
    assert {path.name for path in (site / "units").iterdir()} == bundled
