import pytest

from megatron.rl.rewards.protocol import FrameBuffer, encode

MESSAGES: list[dict] = [{"response": "Σ\ud800\n", "n": 1}, {}, {"x": "y" * 70_000}]


@pytest.mark.parametrize("piece", [1, 3, 4, 5, 65_536, 1_000_000])
def test_messages_survive_any_cut(piece):
    stream = b"".join(encode(message) for message in MESSAGES)
    buffer, received = FrameBuffer(), []
    for start in range(0, len(stream), piece):
        buffer.feed(stream[start : start + piece])
        while (message := buffer.pop()) is not None:
            received.append(message)
    assert received == MESSAGES


def test_nothing_is_popped_before_it_is_complete():
    buffer = FrameBuffer()
    buffer.feed(encode({"a": 1})[:-1])
    assert buffer.pop() is None
