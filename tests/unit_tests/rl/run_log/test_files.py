"""Reading a run's records back, whole and damaged ones."""

import pytest

from megatron.rl.errors import OutputError
from megatron.rl.run_log import METRICS_FILE, read_metrics


def _write(folder, *lines):
    (folder / METRICS_FILE).write_text("".join(line + "\n" for line in lines))


def test_lines_of_one_step_are_merged_in_order(tmp_path):
    _write(tmp_path, '{"step": 2, "a": 1, "b": 1}', '{"step": 0, "a": 5}', '{"step": 2, "b": 7, "c": "NaN"}')
    first, second = read_metrics(tmp_path)
    assert first == {"step": 0, "a": 5}
    assert {name: second[name] for name in "ab"} == {"a": 1, "b": 7}
    assert second["c"] != second["c"]


def test_a_torn_last_line_is_left_out(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n{"step": 2}')
    assert read_metrics(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize("line", ["{", "[1]", "7", '{"a": 1}', '{"step": 1, "a": "high"}', '{"step": true}', ""])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    _write(tmp_path, '{"step": 1}', line, '{"step": 2}')
    with pytest.raises(OutputError, match=f"{METRICS_FILE}, line 2: not a metrics record") as caught:
        read_metrics(tmp_path)
    assert "\n" not in str(caught.value)


def test_folders_without_records_are_told_apart(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OutputError, match=f"{folder} has no {METRICS_FILE}; give the folder of a run"):
            read_metrics(folder)
    _write(tmp_path)
    with pytest.raises(OutputError, match="has no record yet"):
        read_metrics(tmp_path)


def test_a_file_of_bytes_is_refused(tmp_path):
    (tmp_path / METRICS_FILE).write_bytes(b"\xff\xfe\n")
    with pytest.raises(OutputError, match="cannot be read"):
        read_metrics(tmp_path)
