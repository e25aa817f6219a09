"""Chat templates: messages in, one text out, and where in it the assistant speaks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from lightning_boost.data.tokenizers import Tokenizer, TokenizerFile

ASSISTANT = "assistant"

Message = Mapping[str, Any]
Span = tuple[int, int]

_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"


class ChatTemplate:
    """A Jinja template as Hugging Face's tokenizers bring it, run in Jinja's sandbox.

    The clock that templates may ask for (``strftime_now``) is left out: a run's data must not depend on the day.

    Args:
        text: The template.
        name: What messages call it.
        tokens: Special tokens by the names that the template has for them, such as ``eos_token``.

    Raises:
        ValueError: If the text is no template.
    """

    def __init__(self, text: str, *, name: str, tokens: Mapping[str, str]) -> None:
        self.name = name
        self._tokens = tokens
        environment = _environment()
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ValueError(f"chat_template ({name}) is no Jinja template: {error}") from None
        variables = meta.find_undeclared_variables(environment.parse(text))
        self.token_names = sorted(variable for variable in variables if variable.endswith("_token"))
        """Names under which it writes special tokens."""

    def render(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and where its assistant's turns begin and end in it.

        A turn is what is written for it behind the prompt that a model gets when it is to answer. It begins where the
        text of the messages before it ends, with that prompt, and ends where the text with it ends.

        Raises:
            ValueError: If the template refuses the messages, or writes a turn otherwise when others follow.
        """
        whole = self._write(messages)
        places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        turns: list[Span] = []
        for place in places:
            before = self._write(messages[:place], add_generation_prompt=True)
            behind = self._write(messages[: place + 1])
            if not (behind.startswith(before) and whole.startswith(behind)):
                raise ValueError(
                    f"cannot be used: chat_template ({self.name}) writes message {place + 1} otherwise than as a"
                    " continuation of those before it, so that the answer cannot be found; give another template, or"
                    " records of one answer each."
                )
            turns.append((len(before), len(behind)))
        return whole, turns

    def _write(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return self._template.render(**self._tokens, **given)
        except Exception as error:  # a template may fail in any way
            raise ValueError(f"cannot be used: chat_template ({self.name}) fails on it: {error}") from None


class _Generation(Extension):
    """Takes the tags ``generation`` and ``endgeneration``, with which a template marks the assistant's turns."""

    tags = {"generation"}

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between them."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return what templates are written for: the settings and functions of ``transformers``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = to_json  # Jinja's own would mask what HTML does not take
    return environment


def load_chat_template(file: TokenizerFile, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template that is given for a vocabulary, or lies beside it as ``transformers`` saves it.

    Raises:
        FileNotFoundError: If one is given as a file that does not exist.
        ValueError: If there is none, it is no template, or it writes tokens that are not known.
    """
    folder = Path(file.path).parent
    config = _read_config(folder / _CONFIG_FILE)
    name, text = _given(file.chat_template) if file.chat_template else _beside(folder, config)
    if text is None:
        raise ValueError(
            f"tokenizer.chat_template must be given: beside {file.path} lies neither {_TEMPLATE_FILE} nor a"
            f" chat_template in {_CONFIG_FILE}."
        )
    tokens = {key: _content(value) for key, value in (config or {}).items() if key.endswith("_token") and value}
    template = ChatTemplate(text, name=name, tokens=tokens)
    for key in template.token_names:
        if config is None:
            raise ValueError(
                f"chat_template ({name}) writes {key}, and {folder / _CONFIG_FILE}, which would tell it, does not"
                " exist; write the token itself, or put the file there."
            )
        # one that the configuration does not name is left out, as transformers does
        if key in tokens and len(tokenizer.encode(tokens[key])) != 1:
            raise ValueError(f"{key} ({tokens[key]}) of {folder / _CONFIG_FILE} must be one token of {file.path}.")
    return template


def _given(template: str) -> tuple[str, str | None]:
    """Return a name and the text of a template that is given as such, or as a file."""
    if "{" in template:
        return "as given", template
    if not Path(template).is_file():
        raise FileNotFoundError(f"tokenizer.chat_template ({template}) is no Jinja template, and no such file exists.")
    return template, Path(template).read_text(encoding="utf-8")


def _beside(folder: Path, config: Mapping[str, Any] | None) -> tuple[str, str | None]:
    if (folder / _TEMPLATE_FILE).is_file():
        return str(folder / _TEMPLATE_FILE), (folder / _TEMPLATE_FILE).read_text(encoding="utf-8")
    found = (config or {}).get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {each["name"]: each["template"] for each in found}.get("default")
    return str(folder / _CONFIG_FILE), found


def _read_config(path: Path) -> Mapping[str, Any] | None:
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object.")
    return config


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
