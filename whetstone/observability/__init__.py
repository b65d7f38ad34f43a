"""Say what happens: `log_setup` for logs, `tracing` for spans, `metric_names` for the names of all metrics."""
