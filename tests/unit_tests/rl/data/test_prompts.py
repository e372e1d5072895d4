import json

import pytest

from megatron.rl.data import load_prompts
from megatron.rl.errors import ConfigError, DataError


class Letters:
    """A tokenizer of one token a character, after a token that starts every plain text."""

    chat_template: str | None = "a template"

    def encode(self, text, *, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        assert tokenize is False
        assert add_generation_prompt is True
        if conversation[0]["role"] == "system":
            raise ValueError("no system messages here")
        return "".join(f"[{m['role']}]{m['content']}" for m in conversation) + "[assistant]"


class NoTemplate(Letters):
    chat_template = None


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(c) for c in text)


@pytest.fixture
def write(tmp_path):
    def write_prompts(*prompts: object) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": p, "answer": str(i)}) + "\n" for i, p in enumerate(prompts)))
        return str(path)

    return write_prompts


def test_plain_text_is_encoded_as_it_is(write):
    loaded = load_prompts(write("ab", " c\n"), Letters(), max_prompt_tokens=9)
    assert [p.text for p in loaded] == ["ab", " c\n"]
    assert [p.token_ids for p in loaded] == [(1, *ids("ab")), (1, *ids(" c\n"))]
    assert [p.answer for p in loaded] == ["0", "1"]
    assert [p.index for p in loaded] == [0, 1]
    assert len(loaded) == 2
    assert loaded[1] is loaded.prompts[1]
    assert loaded[:1] == loaded.prompts[:1]


def test_messages_go_through_the_template_and_bring_no_second_start_token(write):
    messages = [{"role": "user", "content": "ab"}]
    (prompt,) = load_prompts(write(messages), Letters(), max_prompt_tokens=99)
    assert prompt.text == "[user]ab[assistant]"
    assert prompt.token_ids == ids("[user]ab[assistant]")


def test_plain_text_goes_through_the_template_when_asked(write):
    (prompt,) = load_prompts(write("ab"), Letters(), max_prompt_tokens=99, apply_chat_template="always")
    assert prompt.text == "[user]ab[assistant]"


@pytest.mark.parametrize(
    ("prompt", "mode"), [([{"role": "user", "content": "a"}], "auto"), ("a", "always")], ids=["messages", "asked"]
)
def test_a_tokenizer_without_template_is_named(write, prompt, mode):
    path = write(prompt)
    with pytest.raises(DataError, match=":1: chat messages need a tokenizer with a chat template"):
        load_prompts(path, NoTemplate(), max_prompt_tokens=9, apply_chat_template=mode)


def test_a_template_that_refuses_is_quoted(write):
    path = write("fine", [{"role": "system", "content": "a"}])
    with pytest.raises(DataError, match=r":2: .*refuses the messages \(no system messages here\)"):
        load_prompts(path, Letters(), max_prompt_tokens=9)


def test_the_limit_counts_every_token(write):
    path = write("abcd", "abcde")
    assert len(load_prompts(path, Letters(), max_prompt_tokens=6)) == 2
    with pytest.raises(DataError, match=r":2: the prompt has 6 tokens, over the limit of 5; .*--overlong-prompts skip"):
        load_prompts(path, Letters(), max_prompt_tokens=5)


def test_skipped_prompts_are_counted_and_do_not_move_the_others_index(write):
    loaded = load_prompts(write("a", "abcdefgh", "b", "abcdefgh", "c"), Letters(), max_prompt_tokens=5, overlong="skip")
    assert [(p.index, p.text) for p in loaded] == [(0, "a"), (2, "b"), (4, "c")]
    assert loaded.skipped == 2


def test_all_skipped_is_an_error(write):
    with pytest.raises(DataError, match="all 2 prompts are over the limit of 1 tokens"):
        load_prompts(write("a", "b"), Letters(), max_prompt_tokens=1, overlong="skip")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="empty.jsonl: no prompt in it"):
        load_prompts(str(path), Letters(), max_prompt_tokens=9)


@pytest.mark.parametrize(("limit", "expected"), [(1, [0]), (2, [0, 2]), (3, [0, 2, 3]), (99, [0, 2, 3])])
def test_limit_counts_kept_prompts(write, limit, expected):
    path = write("a", "abcdefgh", "b", "c")
    loaded = load_prompts(path, Letters(), max_prompt_tokens=5, overlong="skip", limit=limit)
    assert [p.index for p in loaded] == expected


def test_an_unknown_treatment_is_refused(write):
    with pytest.raises(ConfigError, match="got 'drop'"):
        load_prompts(write("a"), Letters(), max_prompt_tokens=9, overlong="drop")


def test_a_prompt_without_a_token_is_refused(write):
    class Deaf(Letters):
        def encode(self, text, *, add_special_tokens=True):
            return []

    with pytest.raises(DataError, match=":1: the tokenizer gives this prompt no token"):
        load_prompts(write("a"), Deaf(), max_prompt_tokens=9)


def test_a_transformers_tokenizer(write):
    """The real class: its chat template and its special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "<u>", "<a>", "1", "+", "="]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "<s>{% for m in messages %} <u> {{ m.content }}{% endfor %}{% if add_generation_prompt %} <a>{% endif %}"
    )
    path = write("1 + 1 =", [{"role": "user", "content": "1 + 1"}])
    plain, chat = load_prompts(path, tokenizer, max_prompt_tokens=9)
    assert plain.token_ids == (1, 4, 5, 4, 6)
    assert chat.text == "<s> <u> 1 + 1 <a>"
    assert chat.token_ids == (1, 2, 4, 5, 4, 3)
