import json

import pytest

from megatron.rl.data.records import Record, read_records
from megatron.rl.errors import DataError

MESSAGES = [{"role": "user", "content": "1+1?"}]
# Ways to write that a field has no value; NaN is how json writes a table's empty cell.
ABSENT = [None, "", "  \n", [], {}, float("nan")]
DAPO = {"data_source": "d", "prompt": MESSAGES, "reward_model": {"ground_truth": "34", "style": "rule"}}
LAYOUTS = [
    {"prompt": "1+1=", "answer": "2", "source": "toy", "metadata": {"level": 3}},
    {"prompt": MESSAGES, "answer": "2"},
    DAPO,
    {"question": "Eggs?", "answer": "16-3\n#### 13"},
    {"problem": "Every", "answer": 204, "source": "aime"},
    {"Problem": "Let x", "Answer": 33},
]
FIELDS = {name for layout in LAYOUTS for name in layout}


def parts(*contents):
    """A message whose content is a list of parts, texts given as such."""
    made = [{"type": "text", "text": part} if isinstance(part, str) else part for part in contents]
    return [{"role": "user", "content": made}]


@pytest.fixture
def write(tmp_path):
    """Writes lines (objects as JSON, text and bytes as they are) to a file and gives its path."""

    def write_lines(*lines: object) -> str:
        path = tmp_path / "prompts.jsonl"
        encoded = [x if isinstance(x, bytes) else (x if isinstance(x, str) else json.dumps(x)).encode() for x in lines]
        path.write_bytes(b"\n".join(encoded))
        return str(path)

    return write_lines


def only(path: str) -> Record:
    (record,) = read_records(path)
    return record


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": "1+1=", "answer": "2"}, ("1+1=", "2", "", {})),
        (
            {"prompt": " 1+1=\n", "answer": "2 ", "source": "toy", "metadata": {"level": 3}},
            (" 1+1=\n", "2 ", "toy", {"level": 3}),
        ),
        ({"prompt": MESSAGES, "answer": "2"}, (MESSAGES, "2", "", {})),
        (
            {
                "data_source": "math_dapo",
                "prompt": MESSAGES,
                "ability": "MATH",
                "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": "9a9b6eb4"},
            },
            (MESSAGES, "34", "math_dapo", {}),
        ),
        ({"question": "Eggs?", "answer": "16-3=<<16-3=13>>13\n#### 18"}, ("Eggs?", "18", "", {})),
        ({"question": "Profit?", "answer": "a lot #### no\n#### 70,000"}, ("Profit?", "70000", "", {})),
        ({"question": "Bases?", "answer": "70"}, ("Bases?", "70", "", {})),
        ({"ID": "2024-II-4", "Problem": "Let x", "Solution": "...", "Answer": 33}, ("Let x", "33", "", {})),
        ({"id": 60, "problem": "Every", "answer": "204", "url": "u"}, ("Every", "204", "", {})),
        ({"problem_idx": 1, "problem": "Find", "answer": 70, "source": "aime"}, ("Find", "70", "aime", {})),
        ({"problem": "Zero", "answer": 0}, ("Zero", "0", "", {})),
        ({"prompt": "Σ 七 🙂", "answer": "½"}, ("Σ 七 🙂", "½", "", {})),
    ],
)
def test_layouts(write, line, expected):
    record = only(write(line))
    assert (record.prompt, record.answer, record.source, record.metadata) == expected


@pytest.mark.parametrize("absent", ABSENT, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout))
def test_null_empty_and_absent_are_the_same_in_every_field(write, layout, absent):
    """As in data sets of several layouts put together, where each row has the fields of all."""
    expected = only(write(layout))
    assert only(write({**dict.fromkeys(FIELDS | {"extra_info"}, absent), **layout})) == expected
    for name in FIELDS - layout.keys():
        assert only(write({**layout, name: absent})) == expected, name


@pytest.mark.parametrize("absent", ABSENT, ids=repr)
@pytest.mark.parametrize("name", ["source", "metadata"])
def test_optional_fields_fall_back_to_nothing(write, name, absent):
    record = only(write({"prompt": "p", "answer": "1", "source": "s", "metadata": {"a": 1}, name: absent}))
    assert getattr(record, name) == {"source": "", "metadata": {}}[name]


@pytest.mark.parametrize("absent", ABSENT, ids=repr)
def test_a_reward_model_without_ground_truth_is_none(write, absent):
    graded = {"ground_truth": absent, "style": "rule"}
    assert only(write({"prompt": "p", "answer": "2", "reward_model": graded})).answer == "2"
    with pytest.raises(DataError, match="no answer"):
        only(write({"prompt": "p", "reward_model": graded}))


@pytest.mark.parametrize("absent", ABSENT, ids=repr)
def test_absent_fields_of_a_message_are_taken_out(write, absent):
    message = {"role": "user", "content": "1+1?", "name": absent, "tool_calls": absent}
    assert only(write({"prompt": [message], "answer": "2"})).prompt == MESSAGES


def test_what_a_message_has_besides_is_kept(write):
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "1+1?", "name": "Ann"}]
    assert only(write({"prompt": messages, "answer": "2"})).prompt == messages


@pytest.mark.parametrize("kind", [{}, {"type": "text"}, {"type": None}, {"type": "text", "image_url": None}])
def test_a_single_text_part_is_the_content(write, kind):
    assert only(write({"prompt": parts({"text": "1+1?", **kind}), "answer": "2"})).prompt == MESSAGES


def test_zero_and_false_are_values(write):
    assert only(write({"prompt": "0", "answer": "0", "metadata": {"a": 0, "b": False}})).metadata == {
        "a": 0,
        "b": False,
    }


def test_blank_lines_carriage_returns_and_a_byte_order_mark_do_not_matter(write):
    good = json.dumps({"prompt": "p", "answer": "1"})
    path = write(b"\xef\xbb\xbf" + good.encode(), "", good + "\r", "  ", "", "")
    assert [record.place for record in read_records(path)] == [f"{path}:1", f"{path}:3"]


GOOD = {"prompt": "p", "answer": "1"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "p", "answer": 1', "not JSON .*write one object"),
        ("prompt,answer", "not JSON"),
        ("[", "not JSON"),
        ('{"prompt": "p", "answer": ' + "9" * 5000 + "}", "too large to read .*digits"),
        ("[" * 100_000, "too large to read .*recursion"),
        ([GOOD, GOOD], "not a JSON object; .*got a list"),
        ("3", "not a JSON object; .*got an integer, '3'"),
        ("null", r"not a JSON object; .*\(got null\)"),
        (b'{"prompt": "caf\xe9", "answer": "1"}', "not UTF-8"),
        ({"answer": "1"}, r'no prompt; give the field "prompt" \(the fields with a value here: answer\)'),
        ({}, r"no prompt.*the fields with a value here: none"),
        ({"prompt": None, "answer": "1"}, "no prompt"),
        ({"prompt": " \n", "answer": "1"}, "no prompt"),
        ({"prompt": [], "answer": "1"}, "no prompt"),
        ({"prompt": [{"role": "user", "content": " "}], "answer": "1"}, "the prompt is empty: no message has content"),
        ({"prompt": 5, "answer": "1"}, "neither text nor a list of chat messages .got an integer, '5'"),
        ({"prompt": ["hello"], "answer": "1"}, 'a chat message needs "role" and "content"'),
        ({"prompt": [{"role": "user", "content": 3}], "answer": "1"}, "a chat message needs"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "1"}, "a chat message needs"),
        ({"prompt": [{"role": None, "content": "a"}], "answer": "1"}, "a chat message needs"),
        ({"prompt": [{"from": "human", "value": "a"}], "answer": "1"}, "a chat message needs"),
        ({"prompt": [*MESSAGES, None], "answer": "1"}, "a chat message needs .*got null"),
        ({"prompt": parts(), "answer": "1"}, "a list of one text part .got parts: none"),
        ({"prompt": parts("a", "b"), "answer": "1"}, "a list of one text part .got parts: text, text"),
        ({"prompt": parts({"type": "image", "url": "u"}), "answer": "1"}, "one text part .got parts: image"),
        ({"prompt": parts({"type": "image", "text": ""}), "answer": "1"}, "one text part .got parts: image"),
        ({"prompt": parts({"type": "text", "text": None}), "answer": "1"}, "one text part .got parts: text"),
        ({"prompt": [{"role": "user", "content": ["a"]}], "answer": "1"}, "got parts: text, 'a'"),
        ('{"prompt": "\\ud800", "answer": "1"}', "half a surrogate pair"),
        ({"prompt": "p"}, "no answer"),
        ({"prompt": "p", "answer": None}, "no answer"),
        ({"prompt": "p", "answer": "\t"}, "no answer"),
        ('{"prompt": "p", "answer": NaN}', "no answer"),
        ('{"prompt": "p", "answer": Infinity}', "the answer is no text .got a number, 'inf'"),
        ({"prompt": "p", "answer": 18}, "the answer is no text .got an integer, '18'.; put it in quotes"),
        ({"prompt": "p", "answer": ["18"]}, r"the answer is no text \(got a list\)"),
        ({"prompt": "p", "answer": True}, "the answer is no text .got a boolean"),
        ({"problem": "p", "answer": True}, "the answer is no text .got a boolean"),
        ({"problem": "p", "answer": 1.5}, "the answer is no text .got a number, '1.5'"),
        ({"question": "p", "answer": 18}, "the answer is no text"),
        ({"question": "p"}, "no answer"),
        ({"question": "p", "answer": "first\nsecond"}, "several lines and no final answer"),
        ({"question": "p", "answer": "so\n#### "}, "no answer"),
        ({"prompt": "p", "reward_model": {"style": "rule"}}, "no answer"),
        ({"prompt": "p", "reward_model": "34"}, '"reward_model" must be an object'),
        ({"prompt": "p", "reward_model": {"ground_truth": 34}}, "the answer is no text"),
        ({**GOOD, "source": 3}, '"source" must be text'),
        ({**GOOD, "metadata": [1]}, '"metadata" must be an object'),
    ],
)
def test_every_fault_names_file_and_line_in_one_line(write, line, message):
    path = write(GOOD, "", line, GOOD)
    with pytest.raises(DataError, match=message) as caught:
        list(read_records(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(DataError, match="absent.jsonl: no such prompt file"):
        list(read_records(str(tmp_path / "absent.jsonl")))
    with pytest.raises(DataError, match="cannot be read .Is a directory"):
        list(read_records(str(tmp_path)))
