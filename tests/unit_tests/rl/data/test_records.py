import json

import pytest

from megatron.rl.data.records import Record, read_records
from megatron.rl.errors import DataError

MESSAGES = [{"role": "user", "content": "1+1?"}]


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
        ({"answer": "1"}, r'no prompt; give the field "prompt" \(the fields here: answer\)'),
        ({}, r"no prompt.*the fields here: none"),
        ({"prompt": None, "answer": "1"}, "no prompt"),
        ({"prompt": " \n", "answer": "1"}, "the prompt is empty"),
        ({"prompt": [], "answer": "1"}, "the prompt is empty"),
        ({"prompt": 5, "answer": "1"}, "neither text nor a list of chat messages .got an integer, '5'"),
        ({"prompt": ["hello"], "answer": "1"}, 'a chat message needs "role" and "content"'),
        ({"prompt": [{"role": "user", "content": 3}], "answer": "1"}, "a chat message needs"),
        ('{"prompt": "\\ud800", "answer": "1"}', "half a surrogate pair"),
        ({"prompt": "p"}, "no answer"),
        ({"prompt": "p", "answer": None}, "no answer"),
        ({"prompt": "p", "answer": "\t"}, "the answer is empty"),
        ({"prompt": "p", "answer": 18}, "the answer is no text .got an integer, '18'.; put it in quotes"),
        ({"prompt": "p", "answer": ["18"]}, r"the answer is no text \(got a list\)"),
        ({"prompt": "p", "answer": True}, "the answer is no text .got a boolean"),
        ({"problem": "p", "answer": True}, "the answer is no text .got a boolean"),
        ({"problem": "p", "answer": 1.5}, "the answer is no text .got a number, '1.5'"),
        ({"question": "p", "answer": 18}, "the answer is no text"),
        ({"question": "p"}, "no answer"),
        ({"question": "p", "answer": "first\nsecond"}, "several lines and no final answer"),
        ({"question": "p", "answer": "so\n#### "}, "the answer is empty"),
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
