"""The word by which the job of an attempt is found when the answer to its submission was lost."""

from __future__ import annotations

import hashlib

from trainkit.rundir import RunDir


def submission_token(run: RunDir, attempt: int, follow_up: int = 0) -> str:
    """A word that the job of one attempt has in its comment and no other job has.

    The jobs that wait to go on after it have one each, and count from 1.
    """
    place = f"{run.path}/{attempt}" + (f"+{follow_up}" if follow_up else "")
    return f"trainkit:{hashlib.sha256(place.encode(errors='surrogateescape')).hexdigest()[:16]}"
