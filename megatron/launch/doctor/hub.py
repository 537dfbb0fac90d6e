"""Checks that a model can be read, from a folder or from the Hub with the user's token. The token is never
shown."""

import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from megatron.launch.doctor.check import Check, failed, warning
from megatron.neox_arguments.values.json_text import parse_json
from megatron.neox_arguments.values.local_paths import with_home

_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def model_check(name: str, env: Mapping[str, str] = os.environ, timeout_s: float = 10.0) -> Check:
    """Checks that a HuggingFace model can be read: a folder, ORG/NAME or hf://ORG/NAME, optionally with
    @revision."""
    name = name.removeprefix("hf://")
    title = f"model {name}"
    if with_home(name).exists() or name.startswith(("/", ".", "~")):
        return _folder(title, with_home(name))
    repository, _, revision = name.partition("@")
    token, place = find_token(env)
    token_note = f"token found in {place}" if token else "no token found"
    in_cache = f"hub/models--{repository.replace('/', '--')}/snapshots"
    cached = list((_home(env) / in_cache).glob("*/config.json"))
    if env.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        if cached:
            return Check(title, "ok", f"in the cache ({cached[0].parent}); HF_HUB_OFFLINE is set")
        return failed(
            title, "not in the cache, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE, or download the model first"
        )
    endpoint = env.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    status, code = _ask(f"{endpoint}/{repository}/resolve/{revision or 'main'}/config.json", token, timeout_s)
    if status is None:
        unreachable = f"the Hub cannot be reached ({code})"
        if cached:
            return warning(title, f"{unreachable}; in the cache: {cached[0].parent}")
        return failed(title, f"{unreachable}; not in the cache", "download the model on a machine with a network")
    if status < 400:
        return Check(title, "ok", f"can be read; {token_note}")
    finding, advice = _refusal(status, code, bool(token))
    return failed(title, f"{finding}; {token_note}", advice)


def find_token(env: Mapping[str, str]) -> tuple[str | None, str]:
    """Returns the Hub token and the variable or file that it came from; (None, "") if there is none.

    The places are searched in huggingface_hub's order.
    """
    for variable in _TOKENS:
        if env.get(variable, "").strip():
            return env[variable].strip(), variable
    file = with_home(env.get("HF_TOKEN_PATH") or _home(env) / "token")
    try:
        text = file.read_text().strip()
    except OSError:
        text = ""
    return (text, str(file)) if text else (None, "")


def _folder(title: str, folder: Path) -> Check:
    if not folder.is_dir():
        return failed(title, f"{folder} is not a folder", "name the folder with the model's config.json")
    try:
        kind = parse_json((folder / "config.json").read_text()).get("model_type", "model_type is not set")
    except (OSError, ValueError, AttributeError) as problem:
        return failed(title, f"{folder}: config.json cannot be read ({problem})", "name a HuggingFace model's folder")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return failed(title, f"{folder}: no weights (*.safetensors, *.bin)", "copy the model's weights there too")
    return Check(title, "ok", f"{folder}: {kind}")


def _ask(url: str, token: str | None, timeout_s: float) -> tuple[int | None, str]:
    """Sends a HEAD request. Returns (HTTP status, the Hub's error code), or (None, reason) without an answer.

    A redirect counts as an answer: following it would send the token to another host.
    """
    headers = {"user-agent": "neox-doctor"} | ({"authorization": f"Bearer {token}"} if token else {})
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(urllib.request.Request(url, headers=headers, method="HEAD"), timeout=timeout_s) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as answer:
        return answer.code, answer.headers.get("X-Error-Code", "")
    except OSError as problem:
        return None, str(getattr(problem, "reason", problem))


def _refusal(status: int, code: str, with_token: bool) -> tuple[str, str]:
    """Returns (what an HTTP error status of the Hub means, advice), both in words. code: the Hub's error
    code."""
    if status == 403 or code == "GatedRepo":
        return f"access is not granted ({status})", "ask for access on the model's page, with the token's account"
    if status == 401 and not with_token:
        return "the Hub wants a token, or there is no such model (401)", "check the name; export HF_TOKEN=..."
    if status == 401:
        return "the token is not valid, or there is no such model (401)", "check the name; make a new token"
    if code == "EntryNotFound":
        return f"the model has no config.json ({status})", "name a model in the format of transformers"
    if code == "RevisionNotFound":
        return f"the model has no such revision ({status})", "see its branches and tags"
    if status == 404:
        return "no such model (404)", "check the name: ORG/NAME"
    return f"the Hub answers {status}", "try again later"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def _home(env: Mapping[str, str]) -> Path:
    return with_home(env.get("HF_HOME") or "~/.cache/huggingface")
