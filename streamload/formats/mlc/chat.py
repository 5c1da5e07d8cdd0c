"""mlc-chat-config.json: the model, its sampling, its tokenizer and its conversation template.

A source has a chat template in Jinja, MLC one of its own. The prompts of both are compared: the
source's template is run on a conversation of three messages, and MLC's is taken whose prompt is
equal from the first message on (what comes before, such as a date, MLC leaves to the user). Tokens
that end an answer, and the one that begins a prompt, are the source's.

Source: github.com/mlc-ai/mlc-llm, python/mlc_llm: interface/gen_config.py,
protocol/mlc_chat_config.py, protocol/conversation_protocol.py (``Conversation``, ``as_prompt``) and
conversation_template (texts of the templates); cpp/tokenizers/tokenizers.cc (what tokenizer_info
is). Jinja's settings are those of transformers, utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from itertools import islice
from typing import Any

from streamload.core.bounded_json import parse_json
from streamload.core.system import bounded_child
from streamload.formats.mlc.models import family_of
from streamload.formats.writer import Model

_VERSION = "0.1.0"
_TOKENIZER = "tokenizer.json"
_STEPS_NBYTES = 2**20  # most bytes of the normalizer or decoder in tokenizer.json
_MOST_PLACES = 8  # where these may begin
#: Files of the tokenizer that MLC copies.
TOKENIZER_FILES = (
    *("tokenizer.model", _TOKENIZER, "vocab.json", "merges.txt"),
    *("added_tokens.json", "tokenizer_config.json"),
)
#: Keys of generation_config.json or config.json, and MLC's defaults.
_GENERATION = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "temperature": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_p": 1.0,
}


def chat_config(
    model: Model, quantization: str, template: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the content of mlc-chat-config.json, as far as the source provides it."""
    config = family_of(model).config(model)
    info = {}
    if _TOKENIZER in model.companions:
        info = _tokenizer_info(model.companions[_TOKENIZER]())
    return {
        "version": _VERSION,
        "model_type": model.family,
        "quantization": quantization,
        "model_config": config,
        "vocab_size": config["vocab_size"],
        "context_window_size": config["context_window_size"],
        "sliding_window_size": config.get("sliding_window_size", -1),
        "prefill_chunk_size": config["prefill_chunk_size"],
        "attention_sink_size": config.get("attention_sink_size", -1),
        "tensor_parallel_shards": 1,
        "pipeline_parallel_stages": 1,
        "active_vocab_size": config["vocab_size"],
        **_generation(model),
        **({} if template is None else {"conv_template": template}),
        "tokenizer_files": [name for name in TOKENIZER_FILES if name in model.companions],
        "tokenizer_info": info,
    }


def _generation(model: Model) -> dict[str, Any]:
    """Return the values of `_GENERATION` that the source has, and MLC's defaults for others."""
    found = dict(_GENERATION)
    for one in (model.config, _document(model, "generation_config.json")):
        found |= {key: one[key] for key in _GENERATION if one.get(key) is not None}
    return found


def _document(model: Model, name: str) -> Mapping[str, Any]:
    """Return the JSON object in a file next to the source; {} if there is none."""
    try:
        found = parse_json(model.companions[name]()) if name in model.companions else {}
    except ValueError as error:
        model.refuse(f"{name} is not valid JSON", found=str(error))
    return found if isinstance(found, Mapping) else {}


def _tokenizer_info(raw: bytes) -> dict[str, Any]:
    """Return ``tokenizer_info``: the facts that MLC detects in a tokenizer.json."""
    decoders = _steps(raw, "decoder", "decoders")
    normalizers = _steps(raw, "normalizer", "normalizers")
    kinds = [each.get("type") for each in decoders]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    return {
        "token_postproc_method": "byte_level" if "ByteLevel" in kinds else "byte_fallback",
        "prepend_space_in_encode": any(prepend.items() <= each.items() for each in normalizers),
        "strip_space_in_decode": any(strip.items() <= each.items() for each in decoders),
    }


def _steps(raw: bytes, key: str, several: str) -> list[Mapping[str, Any]]:
    """Return the steps of tokenizer.json's ``key``, such as "normalizer"; [] without it."""
    # a Sequence lists its steps in ``several``; only this part is parsed: the whole file would take
    # 100 MB; words of a vocabulary may equal the key, but are not objects
    places = re.finditer(rf'(?<!\\)"{key}"\s*:\s*(?=\{{)'.encode(), raw)
    for at in islice(places, _MOST_PLACES):
        text = raw[at.end() : at.end() + _STEPS_NBYTES].decode(errors="replace")
        try:
            found, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            continue
        steps = found.get(several) if found.get("type") == "Sequence" else [found]
        steps = steps if isinstance(steps, list) else []
        return [each for each in steps if isinstance(each, Mapping)]
    return []


# --- the conversation template --------------------------------------------------------------------

_CHATML = {
    "name": "chatml",
    "system_template": "<|im_start|>system\n{system_message}<|im_end|>\n",
    "system_message": "You are a helpful assistant.",
    "roles": {"user": "<|im_start|>user", "assistant": "<|im_start|>assistant"},
    "seps": ["<|im_end|>\n"],
    "role_content_sep": "\n",
    "stop_str": ["<|im_end|>"],
}
_GEMMA = {
    "name": "gemma_instruction",
    "system_template": "{system_message}",
    "system_message": "",
    "roles": {"user": "<start_of_turn>user", "assistant": "<start_of_turn>model"},
    "seps": ["<end_of_turn>\n"],
    "role_content_sep": "\n",
    "stop_str": ["<end_of_turn>"],
}
_LLAMA_3 = {
    "name": "llama-3",
    "system_template": "<|start_header_id|>system<|end_header_id|>\n\n{system_message}<|eot_id|>",
    "system_message": "You are a helpful, respectful and honest assistant.",
    "roles": {
        "user": "<|start_header_id|>user",
        "assistant": "<|start_header_id|>assistant",
        "tool": "<|start_header_id|>ipython",
    },
    "seps": ["<|eot_id|>"],
    "role_content_sep": "<|end_header_id|>\n\n",
    "stop_str": [],
}
_PHI_3 = {
    "name": "phi-3",
    "system_template": "<|system|>\n{system_message}",
    "system_message": "You are a helpful digital assistant. Please provide safe, ethical and "
    "accurate information to the user.",
    "roles": {"user": "<|user|>", "assistant": "<|assistant|>"},
    "seps": ["<|end|>\n"],
    "role_content_sep": "\n",
    "stop_str": ["<|endoftext|>"],
}
#: MLC's templates, and what families have of their own.
_TEMPLATES: tuple[Mapping[str, Any], ...] = (_CHATML, _GEMMA, _LLAMA_3, _PHI_3)
_QWEN3 = {"name": "qwen3", "strip_reasoning_in_history": True}
_NAMES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen2": {"name": "qwen2"},
    "gemma3_text": {"name": "gemma3_instruction"},
}
_ASKED, _ANSWERED, _AGAIN = "0 is the first?", "It is.", "And then?"
_MOST_S, _MOST_LENGTH = 20, 2**20  # seconds that a template runs, and characters of its prompt
#: Runs a template of a source, which may be hostile.
_RENDER = """
import json, sys

def refuse(message):
    raise ValueError(message)

given = json.load(sys.stdin)
template, most = given.pop("template"), given.pop("most")
try:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    jinja.globals.update(raise_exception=refuse, strftime_now=lambda form: "")
    prompt = jinja.from_string(template).render(**given)[:most]
except BaseException as error:
    sys.exit(f"{type(error).__name__}: {str(error)[:200]!r}")
json.dump(prompt, sys.stdout)
"""


def conv_template(model: Model) -> tuple[Mapping[str, Any] | None, str]:
    """Return MLC's conversation template for the source's chat template, or None and why not."""
    tokenizer = _document(model, "tokenizer_config.json")
    text = tokenizer.get("chat_template")
    if isinstance(text, list):  # several by name
        named = (each for each in text if isinstance(each, dict) and each.get("name") == "default")
        text = next(named, {}).get("template")
    if "chat_template.jinja" in model.companions:
        text = model.companions["chat_template.jinja"]().decode(errors="replace")
    if not isinstance(text, str) or not text:
        return None, "the source has no chat template"
    tokens = {key: _token(tokenizer.get(key)) for key in ("bos_token", "eos_token")}
    prompt, why = _rendered(text, tokens)
    if prompt is None:
        return None, why
    for each in _TEMPLATES:
        start = prompt.removesuffix(_prompt(each))
        if start != prompt:
            break
    else:
        return None, "the source's chat template is none of MLC's"
    found = _generation(model)
    ends, begin = found["eos_token_id"], tokens["bos_token"]
    begins = bool(begin) and start.startswith(begin)
    return {
        **each,
        **_NAMES.get(model.family, {}),
        **({"system_prefix_token_ids": [found["bos_token_id"]]} if begins else {}),
        "add_role_after_system_message": True,
        "role_templates": {role: f"{{{role}_message}}" for role in ("user", "assistant", "tool")},
        "role_empty_sep": each["role_content_sep"],
        "stop_token_ids": list(ends) if isinstance(ends, list) else [ends],
    }, ""


def _token(found: object) -> str:
    """Return the text of a special token of tokenizer_config.json; "" for none."""
    text = found.get("content") if isinstance(found, Mapping) else found
    return text if isinstance(text, str) else ""


def _prompt(template: Mapping[str, Any]) -> str:
    """Return the prompt that a template of MLC's makes of the conversation."""
    roles, (sep,), after = template["roles"], template["seps"], template["role_content_sep"]
    user, assistant = (roles[role] + after for role in ("user", "assistant"))
    return f"{user}{_ASKED}{sep}{assistant}{_ANSWERED}{sep}{user}{_AGAIN}{sep}{assistant}"


def _rendered(text: str, tokens: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the prompt that a chat template makes of the conversation, or None and why not."""
    said = (("user", _ASKED), ("assistant", _ANSWERED), ("user", _AGAIN))
    messages = [{"role": role, "content": content} for role, content in said]
    given = {"template": text, "messages": messages, "add_generation_prompt": True, **tokens}
    given["most"] = _MOST_LENGTH
    try:
        done = bounded_child(_RENDER, given, _MOST_S)
        prompt = json.loads(done.stdout) if not done.returncode else None
    except (subprocess.TimeoutExpired, ValueError):
        return None, "the source's chat template does not come to an end"
    if prompt is None:
        why = done.stderr.strip()
        if why.startswith("ModuleNotFoundError"):
            return None, "jinja2 is not installed (pip install jinja2)"
        return None, f"the source's chat template cannot be run ({why})"
    return str(prompt), ""
