"""Which tokens are multiplied, in chunks of what size, and how ranks share a chunk."""

import pytest
import torch

from megatron.rl.errors import ConfigError
from megatron.rl.ops import chunking
from megatron.rl.ops.chunking import active_rows, chunk_size, plan_chunks, plan_shared_chunks

NAN = float("nan")


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("weights", [[], [1.0], [0.0], [0.0, 2.0, 0.0, -1.0, NAN, 0.0, 3.0], [1.0] * 7])
def test_chunks_hold_every_active_token_once_and_in_order(weights, size):
    weights = torch.tensor(weights)
    expected = [token for token, weight in enumerate(weights.tolist()) if weight != 0]
    tokens, places = torch.arange(len(weights)), torch.arange(len(expected))
    plan = plan_chunks(active_rows(weights), size)
    assert tokens[plan.rows].tolist() == expected
    assert [token for chunk in plan.chunks for token in tokens[chunk.rows].tolist()] == expected
    assert [place for chunk in plan.chunks for place in places[chunk.part].tolist()] == list(range(len(expected)))
    assert all(0 < len(tokens[chunk.rows]) <= size for chunk in plan.chunks)
    assert plan.widest == min(size, len(expected))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 5, 12, 100])
@pytest.mark.parametrize("active", ["all", "none", "one", "last rank", "uneven"])
def test_shared_chunks_bring_each_token_back_to_its_owner(active, size, ranks):
    """All ranks' plans together: what each sends fills the chunk, what each keeps is its own, nothing is lost."""
    per_rank = 12
    everyone = torch.arange(ranks * per_rank)
    generator = torch.Generator().manual_seed(ranks)
    rows = {
        "all": everyone,
        "none": everyone[:0],
        "one": everyone[17:18],
        "last rank": everyone[-per_rank:],
        "uneven": everyone[torch.rand(len(everyone), generator=generator) < everyone / len(everyone)],
    }[active]
    plans = [plan_shared_chunks(rows, size, per_rank, ranks, rank) for rank in range(ranks)]
    assert all(torch.equal(plan.rows, plans[0].rows) for plan in plans)
    assert plans[0].rows.sort().values.tolist() == rows.tolist()
    for k, chunk in enumerate(plans[0].chunks):
        assert torch.equal(plans[0].rows[chunk.part], chunk.rows)
        assert len(chunk.rows) < size + ranks
        exchanges = [plan.chunks[k].exchange for plan in plans]
        sent = torch.full((ranks, exchanges[0].width), -1)
        for rank, exchange in enumerate(exchanges):
            sent[rank, : len(exchange.own)] = exchange.own + rank * per_rank
        received = sent.flatten()
        places = exchanges[0].places
        assert torch.equal(received if places is None else received[places], chunk.rows)


def test_named_chunk_is_taken():
    assert chunk_size(17, torch.empty(1000, 4)) == 17


def test_chosen_chunk_shrinks_with_the_shard_but_stays_wide_enough_for_a_product(monkeypatch):
    monkeypatch.setattr(chunking, "_memory", lambda device: 16 << 30)
    shards = [torch.empty(rows, 0) for rows in (1, 1000, 32_768, 151_936, 10**9)]
    assert [chunk_size(None, shard) for shard in shards] == [1024, 1024, 1024, 128, 128]
    assert [chunk_size(None, shard.bfloat16()) for shard in shards] == [1024, 1024, 1024, 384, 128]
    # It is not made small beside the weight itself.
    assert [chunk_size(None, torch.empty(1, size).expand(10**6, size)) for size in (64, 2048, 8192)] == [128, 512, 1024]


def test_chosen_chunk_grows_with_the_memory(monkeypatch):
    sizes = []
    for gigabytes in (1, 4, 16, 64):
        monkeypatch.setattr(chunking, "_memory", lambda device, size=gigabytes: size << 30)
        sizes.append(chunk_size(None, torch.empty(100_000, 0)))
    assert sizes == [128, 128, 256, 1024]


def test_memory_is_that_of_the_container_where_it_has_less(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(chunking, "_CONTROL_GROUP", limit)
    whole = chunking._memory(torch.device("cpu"))
    limit.write_text("max\n")
    assert chunking._memory(torch.device("cpu")) == whole
    limit.write_text("3000000000\n")
    assert chunking._memory(torch.device("cpu")) == 3_000_000_000


def test_memory_between_two_powers_of_two_counts_as_the_lower():
    """So that machines of one kind, of which each reports a little less than it was sold with, choose alike."""
    sizes = {
        chunking.chosen_chunk_size(50_000, 64, 4, memory, "cpu") for memory in (1 << 34, (1 << 34) + 1, (1 << 35) - 1)
    }
    assert sizes == {chunking.chosen_chunk_size(50_000, 64, 4, 1 << 34, "cpu")} and sizes != {1024}


def test_chunk_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"\(got -1\)"):
        chunk_size(-1, torch.empty(10, 4))
