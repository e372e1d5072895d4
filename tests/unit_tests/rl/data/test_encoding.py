"""Prompt ids are what the user meant, under real ``transformers`` tokenizers of every habit."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron.rl.data.encoding import PromptEncoder
from megatron.rl.data.records import Record
from megatron.rl.errors import ConfigError, DataError

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<cls>"]
WORDS = [*SPECIAL, "1", "+", "=", "2", "So", "be", "brief", "helpful", "<think>", "[INST]", "[/INST]"]
VOCAB = len(WORDS)
CHATML = (
    "{% if messages[0].role != 'system' %}<|system|> be helpful <|end|> {% endif %}"
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_BOS = "{{ bos_token }} " + CHATML
INSTRUCT = (  # no generation prompt: the user's turn ends in what the assistant's follows on
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% elif m.role == 'user' %} [INST] {{ m.content }} [/INST]"
    "{% else %}{{ raise_exception('only users\n and assistants') }}{% endif %}{% endfor %}"
)
CLOSED = "{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}"


def _tokenizer(before="", after="", template=None, **options):
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word) for word in SPECIAL])
    special = [(word, WORDS.index(word)) for word in f"{before} {after}".split()]
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(f"{before} $A {after}".split()), special_tokens=sorted(set(special))
        )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **options}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)


def _encode(prompt, tokenizer, *, vocab_size=VOCAB, always_chat=False):
    """The prompt's tokens in words; the encoder too."""
    encoder = PromptEncoder(tokenizer, vocab_size=vocab_size, always_chat=always_chat)
    _, ids = encoder(Record("FILE:7", prompt, "2", "", {}))
    return " ".join(WORDS[id] for id in ids), encoder


def _refused(prompt, tokenizer, message, error=DataError, **options):
    with pytest.raises(error, match=message) as caught:
        _encode(prompt, tokenizer, **options)
    assert "\n" not in str(caught.value)
    if error is DataError:
        assert str(caught.value).startswith("FILE:7: ")


def _chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    "before, after, text, expected, unended",
    [
        ("", "", "1 + 1 =", "1 + 1 =", 0),
        ("<s>", "", "1 + 1 =", "<s> 1 + 1 =", 0),
        ("", "</s>", "1 + 1 =", "1 + 1 =", 1),
        ("<s>", "</s>", "1 + 1 =", "<s> 1 + 1 =", 1),
        ("<cls> <s>", "<|end|> </s>", "1", "<cls> <s> 1", 1),
        ("</s>", "</s>", "1 =", "</s> 1 =", 1),  # one token for both ends, as GPT-2 has
        # what carries the first token already gets no second one
        ("<s>", "", "<s> 1 + 1", "<s> 1 + 1", 0),
        ("<s>", "</s>", "<s> 1 + 1", "<s> 1 + 1", 1),
        ("<s>", "", "<s>", "<s>", 0),
        ("", "", "<s> 1", "<s> 1", 0),
        ("<cls> <s>", "", "<s> 1", "<cls> <s> <s> 1", 0),  # only half of what the tokenizer puts there
        ("<s>", "", "<s> <|user|> 1 <|end|> <|assistant|>", "<s> <|user|> 1 <|end|> <|assistant|>", 0),
        ("<s>", "", "<|user|> 1 <|end|> <|assistant|>", "<s> <|user|> 1 <|end|> <|assistant|>", 0),
        ("<s>", "", "1 </s> 2", "<s> 1 </s> 2", 0),  # in the middle it is the user's own
    ],
)
def test_plain_text(before, after, text, expected, unended):
    words, encoder = _encode(text, _tokenizer(before, after))
    assert words == expected
    assert encoder.unended == unended


@pytest.mark.parametrize("before", ["", "<s>"])
@pytest.mark.parametrize("after", ["", "</s>"])
@pytest.mark.parametrize(
    "messages, template, expected",
    [
        (_chat(("user", "1 + 1")), CHATML, "<|system|> be helpful <|end|> <|user|> 1 + 1 <|end|> <|assistant|>"),
        (_chat(("user", "1 + 1")), WITH_BOS, "<s> <|system|> be helpful <|end|> <|user|> 1 + 1 <|end|> <|assistant|>"),
        (_chat(("system", "be brief")), CHATML, "<|system|> be brief <|end|> <|assistant|>"),
        (_chat(("user", "1")), INSTRUCT, "<s> [INST] 1 [/INST]"),
        (
            _chat(("system", ""), ("user", "1"), ("assistant", "2"), ("user", "So")),
            CHATML,
            "<|system|> <|end|> <|user|> 1 <|end|> <|assistant|> 2 <|end|> <|user|> So <|end|> <|assistant|>",
        ),
        # the assistant's last message is continued
        (
            _chat(("system", "be brief"), ("user", "1 +"), ("assistant", "So 2 =")),
            CHATML,
            "<|system|> be brief <|end|> <|user|> 1 + <|end|> <|assistant|> So 2 =",
        ),
        (
            _chat(("system", "be brief"), ("user", "1"), ("assistant", "")),
            CHATML,
            "<|system|> be brief <|end|> <|user|> 1 <|end|> <|assistant|>",
        ),
        (_chat(("user", "1"), ("assistant", "<think>")), INSTRUCT, "<s> [INST] 1 [/INST] <think>"),
        (
            _chat(("user", "1"), ("assistant", "2"), ("user", "=")),
            INSTRUCT,
            "<s> [INST] 1 [/INST] 2 </s> [INST] = [/INST]",
        ),
    ],
)
def test_messages_have_the_special_tokens_of_the_template_alone(messages, template, expected, before, after):
    words, encoder = _encode(messages, _tokenizer(before, after, template))
    assert words == expected
    assert encoder.unended == 0


def test_the_text_is_what_was_encoded():
    encoder = PromptEncoder(_tokenizer("<s>", "</s>", WITH_BOS), vocab_size=VOCAB, always_chat=True)
    text, ids = encoder(Record("FILE:7", "1 + 1", "2", "", {}))
    assert text == "<s> <|system|> be helpful <|end|> <|user|> 1 + 1 <|end|> <|assistant|>"
    assert [WORDS[id] for id in ids] == text.split()


def test_messages_are_left_as_they_are():
    messages = _chat(("user", "1"), ("assistant", "2"))
    _encode(messages, _tokenizer(template=CHATML))
    assert messages == _chat(("user", "1"), ("assistant", "2"))


@pytest.mark.parametrize("prompt", ["1", _chat(("user", "1"))])
def test_a_tokenizer_without_template_is_named(prompt):
    message = "chat messages need a tokenizer with a chat template"
    _refused(prompt, _tokenizer(), message, always_chat=True)


@pytest.mark.parametrize("prompt", ["<s> 1", "<|user|> 1 <|end|> <|assistant|>", "</s> 1"])
@pytest.mark.parametrize("template", [CHATML, WITH_BOS])
def test_text_that_went_through_a_template_does_not_go_again(prompt, template):
    message = f"starts with the special token '{prompt.split()[0]}'.*leave --apply-chat-template out".replace(
        "|", r"\|"
    )
    _refused(prompt, _tokenizer("<s>", template=template), message, always_chat=True)


@pytest.mark.parametrize("messages", [_chat(("user", "<s> 1")), _chat(("system", "So"), ("user", " <|user|> 1"))])
def test_a_message_that_went_through_a_template_does_not_go_again(messages):
    message = "starts with the special token '<.*make it the prompt itself instead of a message"
    _refused(messages, _tokenizer("<s>", template=WITH_BOS), message)


def test_what_the_assistant_begins_with_is_its_own():
    words, _ = _encode(_chat(("user", "1"), ("assistant", "<cls> So")), _tokenizer(template=INSTRUCT))
    assert words == "<s> [INST] 1 [/INST] <cls> So"


@pytest.mark.parametrize(
    "prompt, template",
    [
        ("1 + 1 </s>", None),
        ("</s>", None),
        (_chat(("user", "1")), CLOSED),
        (_chat(("user", "1"), ("assistant", "2 </s>")), CHATML),
    ],
)
def test_a_prompt_that_ends_the_sequence_is_refused(prompt, template):
    _refused(prompt, _tokenizer("<s>", template=template), "ends in the end-of-sequence token '</s>'")


@pytest.mark.parametrize("role", ["human", "gpt", "User", "", "usr", "m"])
def test_a_role_that_no_template_knows_is_refused(role):
    message = f"does not know the role '{role}' of a message; choose one of system"
    _refused(_chat((role, "1")), _tokenizer(template=CHATML), message)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_role_that_the_template_names_is_taken(quote):
    template = CHATML + "{% if messages[0].role == " + f"{quote}end{quote}" + " %} So{% endif %}"
    words, _ = _encode(_chat(("end", "1")), _tokenizer(template=template))
    assert words == "<|system|> be helpful <|end|> <|end|> 1 <|end|> <|assistant|> So"


@pytest.mark.parametrize(
    "messages, message",
    [
        (_chat(("system", "be brief"), ("user", "1")), "refuses the messages .only users and assistants"),
        (_chat(("tool", "2")), "refuses the messages .only users and assistants"),
    ],
)
def test_a_template_that_refuses_is_quoted_in_one_line(messages, message):
    _refused(messages, _tokenizer(template=INSTRUCT), message)


def test_a_template_that_drops_the_message_to_continue_is_quoted():
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    _refused(
        _chat(("user", "1"), ("assistant", "2")), _tokenizer(template=template), "refuses the messages .*final message"
    )


@pytest.mark.parametrize("prompt", ["1 helpful", _chat(("user", "helpful"))])
def test_a_token_outside_the_vocabulary_is_named(prompt):
    number = WORDS.index("helpful")
    message = f"the prompt has the token 'helpful', whose id {number} is outside the model's vocabulary of {number};"
    _refused(prompt, _tokenizer(template=CHATML), message, vocab_size=number)
    _encode("1", _tokenizer(), vocab_size=number)


def test_a_prompt_without_a_token_is_refused():
    tokenizer = _tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("1", "removed")
    _refused("111", tokenizer, "the tokenizer gives this prompt no token")


def test_a_tokenizer_whose_special_tokens_change_the_text_is_refused(monkeypatch):
    tokenizer = _tokenizer()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, add_special_tokens=True: encode(text)[add_special_tokens:])
    _refused("1 + 2", tokenizer, "cuts a text into other tokens", error=ConfigError)
