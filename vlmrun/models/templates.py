"""Chat templates of families, for folders that hold none: an old copy, or one made by hand.

Each writes one turn of the user's, pictures first, and where the answer starts. The start token is
the tokenizer's to add. Sources: transformers' conversion scripts and documentation of each model.
"""

import json

PICTURE = "{{ image_token }}"
COUNT = "(message['content'] | selectattr('type', 'equalto', 'image') | list | length)"
TEXT = "{{ message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text')"
TEXT += " | join }}"


def template(system: str, user: str, answer: str, *, image: str = "<>\n", default: str = "") -> str:
    """The Jinja template of a form.

    system, user: how what they say is written, with % for the text; user has its pictures at @.
    image: how each picture is written, with <> for its token; default: what the system says
    where a chat has no system prompt.
    """
    pictures = f"{{% for i in range({COUNT}) %}}{literal(image, '<>', PICTURE)}{{% endfor %}}"
    before, _, after = user.partition("@")
    asked = literal(before, "%", TEXT) + pictures + literal(after, "%", TEXT)
    first = ""
    if default:
        said = literal(system, "%", literal(default))
        first = f"{{% if messages[0]['role'] != 'system' %}}{said}{{% endif %}}"
    return (
        f"{first}{{% for message in messages %}}{{% if message['role'] == 'system' %}}"
        f"{literal(system, '%', TEXT)}{{% else %}}{asked}{{% endif %}}{{% endfor %}}"
        f"{literal(answer)}"
    )


def literal(text: str, mark: str = "", written: str = "") -> str:
    """Text as Jinja writes it, character for character, with `written` at its mark: a template's
    own line ends are dropped in some places."""
    pieces = text.split(mark) if mark else [text]
    return written.join(f"{{{{ {json.dumps(piece)} }}}}" if piece else "" for piece in pieces)


HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA3_USER = HEADER.format("user") + "@%<|eot_id|>"
LLAMA3_ANSWER = HEADER.format("assistant")

VICUNA = template("% ", "USER: @% ", "ASSISTANT:")
VICUNA_NEXT = template(
    "% ",
    "USER: @% ",
    "ASSISTANT:",
    default="A chat between a curious human and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the human's questions.",
)
MISTRAL = template("<<SYS>>\n%\n<</SYS>>\n\n", "[INST] @% [/INST]", "")
HERMES = template(
    "<|im_start|>system\n%<|im_end|>",
    "<|im_start|>user\n@%<|im_end|>",
    "<|im_start|>assistant\n",
    default="Answer the questions.",
)
QWEN = template(
    "<|im_start|>system\n%<|im_end|>\n",
    "<|im_start|>user\n@%<|im_end|>\n",
    "<|im_start|>assistant\n",
    default="You are a helpful assistant.",
)
ONEVISION = template(
    "<|im_start|>system \n%<|im_end|>",
    "<|im_start|>user @\n%<|im_end|>",
    "<|im_start|>assistant\n",
    image="<>",
)
LLAMA3 = template(HEADER.format("system") + "%<|eot_id|>", LLAMA3_USER, LLAMA3_ANSWER)
LLAMA3_NEXT = template(
    HEADER.format("system") + "%<|eot_id|>",
    LLAMA3_USER,
    LLAMA3_ANSWER,
    default="You are a helpful language and vision assistant. You are able to understand the "
    "visual content that the user provides, and assist the user with a variety of tasks using "
    "natural language.",
)
JOYCAPTION = template(
    HEADER.format("system")
    + "Cutting Knowledge Date: December 2023\nToday Date: 26 July 2024\n\n%<|eot_id|>",
    LLAMA3_USER,
    LLAMA3_ANSWER,
    image="<|reserved_special_token_70|><><|reserved_special_token_71|>",
    default="You are a helpful image captioner.",
)
# whose prompts a family knows, by its name, for those who have to look for a template
KNOWN = {
    "LLaVA": "Vicuna, Llama 3, JoyCaption, and Mistral where its version is named",
    "LLaVA-NeXT": "Vicuna, Llama 3, Mistral, Hermes on Yi, and Qwen",
    "LLaVA-OneVision": "Qwen",
}
