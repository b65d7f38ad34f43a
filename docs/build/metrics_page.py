"""The page of `/metrics`, made from the names themselves. Adds how to read and to scrape them."""

from collections.abc import Iterator, Sequence

from whetstone.observability.metric_names import DATABASE, PROCESS, PROXY, VLLM, Metric

_HEAD = """# Metrics

`GET /metrics` of each proxy, in Prometheus' format. It has the figures of the proxy itself, of the database
(judging and training, so that workers need no port), and of the vLLM servers, which only the proxy reaches. If
there are API keys, it needs an admin key of the home project:

<!-- not run: it is Prometheus' to read -->
```yaml
scrape_configs:
  - job_name: whetstone
    authorization: {type: Bearer, credentials_file: /run/secrets/admin_key}
    static_configs: [{targets: ["proxy:8000"]}]
```

No app waits for a scrape: calls are counted by the thread that writes them to SQL, queues are read from indexes on what
is not over, steps only since the last scrape. While the database is away its figures are left out. What was not
measured has no sample: missing is not 0.

**Several proxies.** Figures of a proxy itself add up (`sum`); figures of the database and of the servers are the
same at every proxy: take `max` first, or they count once for each.
`sum(max by (policy, judge) (increase(whetstone_judge_cost_usd_total[1d])))`.

In `containers/` lie a [Grafana dashboard](../containers/grafana/dashboards/whetstone.json) and
[alert rules](../containers/prometheus/alerts.yml), each rule with what to do about it; the profile `watch` of
docker-compose.yml starts both ([production](deploy.md)). Query a histogram as `…_bucket`, `…_sum`, `…_count`.
"""
_SINKS = """## Where else figures go

All of these are off until you name them.

| | what | setting |
|---|---|---|
| OpenTelemetry | a span for each call, judgement and step: [traces](logs.md#traces) | `log.otlp_endpoint` |
| Langfuse | the same spans | `log.langfuse_url`, and its keys in the environment: [traces](logs.md#langfuse) |
| TensorBoard | each step's figures, in `<data>/tensorboard/<policy>` | `trainer.sinks = ["tensorboard"]` |
| Weights & Biases | each step's figures, a run for each policy and start | `trainer.sinks = ["wandb"]`, and `WANDB_…` |
"""


def page(made: str) -> str:
    """Return the page. `made`: the note at its top that it is generated."""
    sections: tuple[tuple[str, str, Sequence[Metric]], ...] = (
        ("The proxy", "What one process knows of itself, since its start.", PROXY),
        ("Its process", "What the kernel reports about it.", PROCESS),
        ("Judging and training", "What the database knows: the same from every proxy.", DATABASE),
        (
            "vLLM",
            "Passed on from each server unchanged, with `replica` (its address) beside its own labels `engine` and "
            "`model_name`. The rest of its figures stay with it.",
            VLLM,
        ),
    )
    lines = [made, _HEAD]
    for title, what, names in sections:
        lines += _section(title, what, names)
    return "\n".join([*lines, _SINKS])


def _section(title: str, what: str, names: Sequence[Metric]) -> Iterator[str]:
    yield f"## {title}\n\n{what}\n"
    yield "| name | kind | labels | meaning |\n|---|---|---|---|"
    for one in names:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        name = one.series_names[0] if one.kind == "counter" else one.name
        yield f"| `{name}` | {one.kind} | {labels} | {one.meaning} |"
    yield ""
