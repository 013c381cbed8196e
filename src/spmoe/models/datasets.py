"""Files of the hub's datasets, for prompts to measure on."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download

from spmoe.errors import UsageError, reason


def dataset_file(repository: str, file: str) -> Path:
    """Download a file of a dataset, unless it is in the hub's cache."""
    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except Exception as error:  # the hub client raises anything from a socket error to its own classes
        raise UsageError(
            f"{file} of the dataset {repository} cannot be had from the hub ({reason(error)}); go online, or name a "
            "file of your own"
        ) from error
