"""Say how the proxy is, for Prometheus.

`exposition` writes `/metrics` from `traffic` (calls), `rejections`, `vllm` (its own figures, and whether all tokens are
recorded) and `store` (what waits, and the steps).
"""
