"""Servers' own metrics by meaning: pages as vLLM, llama.cpp, TensorRT-LLM and our host write them."""

from __future__ import annotations

import pytest

from pipelines.probe.metrics import Scrape, read

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a model {odd}"} 3.0
vllm:num_requests_running{engine="1",model_name="a model {odd}"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a model {odd}"} 2.0
vllm:num_requests_waiting{engine="1",model_name="a model {odd}"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 900.0
vllm:kv_cache_usage_perc{engine="0",model_name="a model {odd}"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a model {odd}"} 0.5
vllm:prefix_cache_queries_total{engine="0",model_name="a model {odd}"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="a model {odd}"} 1.5e+02
vllm:prefix_cache_queries_created{engine="0"} 1.7e+09
"""
LLAMA = """\
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
llamacpp:requests_deferred 12
llamacpp:n_tokens_max 512
"""
TRTLLM = """\
trtllm_num_requests_waiting{model_name="m",engine_type="trtllm"} 6.0
trtllm_num_requests_running{model_name="m",engine_type="trtllm"} 8.0
trtllm_kv_cache_utilization{model_name="m",engine_type="trtllm"} 0.125
trtllm_kv_cache_hit_rate{model_name="m",engine_type="trtllm"} 0.75
"""
HOST = """\
quantgate_host_requests_open 5.0
quantgate_host_sequences_running 4.0
"""


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (VLLM, Scrape(queue=7.0, running=4.0, kv_usage=0.5, prefix_hits=150.0, prefix_queries=1000.0)),
        (LLAMA, Scrape(queue=12.0, running=4.0)),
        (TRTLLM, Scrape(queue=6.0, running=8.0, kv_usage=0.125, prefix_hit_rate=0.75)),
        (HOST, Scrape(queue=1.0, running=4.0)),
    ],
    ids=["vllm", "llama.cpp", "trtllm", "host"],
)
def test_pages_of_servers(page: str, expected: Scrape) -> None:
    """Counts are added up over a server's engines, the fullest cache counts, and names must match whole."""
    assert expected == read(page)


@pytest.mark.parametrize("page", ["", "\n\n", "# only a comment\n", "other_metric 1\n", "<html>not metrics</html>"])
def test_a_page_of_nothing_known_is_nothing(page: str) -> None:
    """What is not told stays None; it is not zero."""
    assert Scrape() == read(page)


@pytest.mark.parametrize("line", ["llamacpp:requests_deferred", "llamacpp:requests_deferred x",
                                  "llamacpp:requests_deferred NaN", "llamacpp:requests_deferred{a=\"b\"}"])  # fmt: skip
def test_lines_without_a_number_are_passed_over(line: str) -> None:
    """A value that is none takes nothing else with it."""
    assert Scrape(running=4.0) == read(f"{line}\nllamacpp:requests_processing 4 1700000000000\n")


def test_the_hosts_own_names_are_those_it_writes() -> None:
    """The table knows the names that our host's metrics have now."""
    from pipelines.engine.host.metrics import Metrics

    page, _ = Metrics().page(open_tickets=9, running=2)
    found = read(page.decode())
    assert (7.0, 2.0) == (found.queue, found.running)
