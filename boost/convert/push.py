"""Uploads an exported folder to the Hugging Face Hub, using the login stored by huggingface_hub."""

from pathlib import Path

from boost.data.hub import quiet_hub
from boost.errors import ConfigError, StorageError


def require_pushable(repo: str) -> None:
    """Raises ConfigError if `repo` is not USER/NAME or there is no login. Call it before writing anything."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        valid = repo.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise ConfigError(f"--push = '{repo}' is not a repository name; expected USER/NAME, such as me/cola-60m")
    if not get_token():
        raise ConfigError(f"--push = '{repo}' requires a Hugging Face Hub login; run 'hf auth login', or set HF_TOKEN")


def push(folder: Path, repo: str, private: bool) -> str:
    """Creates the model repository if it does not exist, uploads the folder in one commit and returns the repository's URL.

    `private` applies to a new repository only. Raises StorageError if the upload fails; the folder is kept.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="boost")
    try:
        with quiet_hub():
            url = api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, repo_type="model", folder_path=folder, commit_message="Upload model")
    except Exception as error:
        # The client and its transports raise dozens of exception types, none of which is recoverable here.
        line = " ".join(str(error).split()) or "no message"
        raise StorageError(
            f"--push = '{repo}' failed ({type(error).__name__}: {line:.300}); '{folder}' is complete: check the login and the "
            f"network, then run 'hf upload {repo} {folder}'"
        ) from None
    return str(url)
