"""Profiles on disk, found again as long as the node is the same."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.nodes.profile import ComputeProfile, Effort
from edgeshard.profiles.report import parse_profile, profile_text


class ProfileStore:
    """`STATE_DIR/profiles`, one JSON file for each node, model shape and format of its weights.

    A file that cannot be read or is of another version counts as not measured.
    """

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / "profiles"

    def path(
        self,
        fingerprint: str,
        model_hash: str,
        dtype: DType,
        quantisation: Quantisation | None = None,
    ) -> Path:
        weights = dtype if quantisation is None else f"{dtype}-{quantisation}"
        return self._directory / f"{fingerprint}-{model_hash}-{weights}.json"

    def find(
        self,
        fingerprint: str,
        model_hash: str,
        dtype: DType,
        quantisation: Quantisation | None = None,
        effort: Effort = Effort.FIRST,
        beside_stages: bool = True,
    ) -> ComputeProfile | None:
        """The profile of exactly this node and model, or None. A profile with less than `effort`
        does not count. A profile that was measured while stages ran counts only with
        `beside_stages`."""
        key = (fingerprint, model_hash, dtype, quantisation)
        try:
            profile = parse_profile(ComputeProfile, self.path(*key).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, InvalidArgumentError):
            return None
        is_same = (
            profile.fingerprint,
            profile.model_hash,
            profile.dtype,
            profile.quantisation,
        ) == key
        counts = profile.effort.reaches(effort) and (beside_stages or not profile.beside_stages)
        return profile if is_same and counts else None

    def keep(self, profile: ComputeProfile) -> Path:
        """Write at once or not at all. Raises InvalidArgumentError when the directory cannot be
        written to."""
        path = self.path(
            profile.fingerprint, profile.model_hash, profile.dtype, profile.quantisation
        )
        temporary: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, prefix=".profile-", delete=False
            ) as file:
                temporary = file.name
                file.write(profile_text(profile) + "\n")
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
            raise InvalidArgumentError(
                f"{path.parent} cannot be written to: {error.strerror}; give another --state-dir",
                field="state-dir",
            ) from None
        return path
