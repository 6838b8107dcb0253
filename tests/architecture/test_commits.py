"""The commit hook: it accepts a short subject, and refuses others with the reason."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / ".githooks" / "commit-msg"
WAIT_S = 60


def check(message: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the hook as git does, which passes the path of the message."""
    path = folder / "COMMIT_EDITMSG"
    path.write_text(message, encoding="utf-8")
    return subprocess.run([HOOK, path], capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        ("Merge the modules of the spawn channel\n", ""),
        ("“é”" * 24 + "\n\nCharacters are counted, not bytes.\n", ""),
        ("# a comment of git\nSay why\n\n# " + "x" * 100 + "\n", ""),
        ("x" * 73 + "\n\nThe body.\n", "has 73 characters"),
        ("The subject\nand at once the body\n", "must be empty"),
    ],
    ids=["subject", "72-characters", "comments", "long", "without a gap"],
)
def test_commit_hook_accepts_short_subjects_and_refuses_others_with_the_reason(
    message: str, refusal: str, tmp_path: Path
) -> None:
    ended = check(message, tmp_path)
    assert ended.returncode == bool(refusal)
    assert refusal in ended.stderr if refusal else ended.stderr == ""
