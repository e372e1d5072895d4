import json

import pytest

from megatron.rl.data import load_prompts
from megatron.rl.errors import ConfigError, DataError

VOCAB = 0x110000  # of a tokenizer of characters


class Letters:
    """A tokenizer of one token a character, after a token that starts every plain text."""

    chat_template: str | None = "a template"
    eos_token_id = None
    added_tokens_decoder: dict = {}

    def encode(self, text, *, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt, continue_final_message):
        assert tokenize is False
        assert add_generation_prompt is True
        assert continue_final_message is False
        if conversation[0]["role"] == "system":
            raise ValueError("no system\nmessages here")
        return "".join(f"[{m['role']}]{m['content']}" for m in conversation) + "[assistant]"


def load(path, tokenizer, **options):
    return load_prompts(path, tokenizer, **{"vocab_size": VOCAB, **options})


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
    loaded = load(write("ab", " c\n"), Letters(), max_prompt_tokens=9)
    assert [p.text for p in loaded] == ["ab", " c\n"]
    assert [p.token_ids for p in loaded] == [(1, *ids("ab")), (1, *ids(" c\n"))]
    assert [p.answer for p in loaded] == ["0", "1"]
    assert [p.index for p in loaded] == [0, 1]
    assert len(loaded) == 2
    assert loaded[1] is loaded.prompts[1]
    assert loaded[:1] == loaded.prompts[:1]


def test_messages_go_through_the_template_and_bring_no_second_start_token(write):
    messages = [{"role": "user", "content": "ab"}]
    (prompt,) = load(write(messages), Letters(), max_prompt_tokens=99)
    assert prompt.text == "[user]ab[assistant]"
    assert prompt.token_ids == ids("[user]ab[assistant]")


def test_plain_text_goes_through_the_template_when_asked(write):
    (prompt,) = load(write("ab"), Letters(), max_prompt_tokens=99, apply_chat_template="always")
    assert prompt.text == "[user]ab[assistant]"


def test_a_template_that_refuses_is_quoted(write):
    path = write("fine", [{"role": "system", "content": "a"}])
    with pytest.raises(DataError, match=r":2: .*refuses the messages \(no system messages here\)"):
        load(path, Letters(), max_prompt_tokens=9)


def test_the_limit_counts_every_token(write):
    path = write("abcd", "abcde")
    assert len(load(path, Letters(), max_prompt_tokens=6)) == 2
    with pytest.raises(DataError, match=r":2: the prompt has 6 tokens, over the limit of 5; .*--overlong-prompts skip"):
        load(path, Letters(), max_prompt_tokens=5)


def test_skipped_prompts_are_counted_and_do_not_move_the_others_index(write):
    loaded = load(write("a", "abcdefgh", "b", "abcdefgh", "c"), Letters(), max_prompt_tokens=5, overlong="skip")
    assert [(p.index, p.text) for p in loaded] == [(0, "a"), (2, "b"), (4, "c")]
    assert loaded.skipped == 2


def test_all_skipped_is_an_error(write):
    with pytest.raises(DataError, match="all 2 prompts are over the limit of 1 tokens"):
        load(write("a", "b"), Letters(), max_prompt_tokens=1, overlong="skip")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="empty.jsonl: no prompt in it"):
        load(str(path), Letters(), max_prompt_tokens=9)


@pytest.mark.parametrize(("limit", "expected"), [(1, [0]), (2, [0, 2]), (3, [0, 2, 3]), (99, [0, 2, 3])])
def test_limit_counts_kept_prompts(write, limit, expected):
    path = write("a", "abcdefgh", "b", "c")
    loaded = load(path, Letters(), max_prompt_tokens=5, overlong="skip", limit=limit)
    assert [p.index for p in loaded] == expected


def test_an_unknown_treatment_is_refused(write):
    with pytest.raises(ConfigError, match="got 'drop'"):
        load(write("a"), Letters(), max_prompt_tokens=9, overlong="drop")


def test_prompts_that_the_tokenizer_would_end_are_counted(write):
    class Ending(Letters):
        def encode(self, text, *, add_special_tokens=True):
            return [*(ord(c) for c in text), *([2] * add_special_tokens)]

    loaded = load(write("ab", "c"), Ending(), max_prompt_tokens=2)
    assert [p.token_ids for p in loaded] == [ids("ab"), ids("c")]
    assert loaded.unended == 2
    assert load(write("ab"), Letters(), max_prompt_tokens=9).unended == 0


def test_a_token_outside_the_vocabulary_is_told_with_its_line(write):
    class Named(Letters):
        def convert_ids_to_tokens(self, ids):
            return [chr(id) for id in ids]

    with pytest.raises(DataError, match=r":2: the prompt has the token 'é', whose id 233 is outside .* of 200"):
        load(write("e", "é"), Named(), vocab_size=200, max_prompt_tokens=9)
