"""Model files in Hugging Face repositories. The hub's own cache is looked at first, without any network.

The hub client knows addresses and its cache; the bytes come through fetch.py, so that resuming, checking and
advice are the same as for every other source. This file does not know tags or the models folder.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hipfire.base import env
from hipfire.base.errors import TransportError
from hipfire.checkpoint.fetch import Access, Transfer, download
from hipfire.checkpoint.partial import Target, require_space, sha256_file


def fetch_hf(
    repo: str,
    file: str,
    staging: Path,
    transfer: Transfer,
    *,
    label: str,
    target: Target,
    revision: str | None = None,
) -> tuple[Path, str]:
    """Put a file of the repository (OWNER/NAME) into `staging` and return it with its SHA-256.

    A revision in the hub's cache is used when it has the right size, otherwise the file is downloaded with
    the token in HF_TOKEN, if any.
    """
    # the hub client takes long to import, and only this command needs it
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache  # noqa: PLC0415

    staging.mkdir(parents=True, exist_ok=True)
    whole = staging / "whole"
    cached = try_to_load_from_cache(repo, file, revision=revision)
    if isinstance(cached, str) and (target.size is None or Path(cached).stat().st_size == target.size):
        transfer.progress.note(f"{label}: taken from the hub's cache")
        _link_or_copy(Path(cached).resolve(), whole)
        return whole, sha256_file(whole)
    if constants.HF_HUB_OFFLINE:
        raise TransportError(
            f"{repo}/{file} is not in the hub's cache", hint="unset HF_HUB_OFFLINE to fetch it"
        )
    url = hf_hub_url(repo, file, revision=revision, endpoint=env.hf_endpoint())
    digest = download(
        url,
        staging / "hf.part",
        target=target,
        transfer=transfer,
        label=label,
        access=Access("hub", token=env.hf_token()),
    )
    (staging / "hf.part").replace(whole)
    return whole, digest


def _link_or_copy(original: Path, destination: Path) -> None:
    destination.unlink(missing_ok=True)
    try:
        os.link(original, destination)
    except OSError:
        require_space(destination.parent, original.stat().st_size)
        shutil.copyfile(original, destination)
