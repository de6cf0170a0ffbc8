"""Stand-ins for an engine's Python, and what their tests watch."""

import asyncio
from pathlib import Path

WAIT_S = 10


def make_python(folder: Path, script: str) -> Path:
    """Write a stand-in for an interpreter, which runs `script` whatever it is asked to run."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def make_model_folder(folder: Path) -> Path:
    """Write what launchers take for a model."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


async def wait_for_text(path: Path, text: str) -> str:
    """Wait until a file holds `text`; return all that it holds."""
    async with asyncio.timeout(WAIT_S):
        while text not in (found := path.read_text()):
            await asyncio.sleep(0.01)
    return found
