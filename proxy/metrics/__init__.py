"""Say how the proxy is, for Prometheus.

`exposition` writes `/metrics` from `traffic` (calls), `completeness` (are all tokens recorded), `rejections`, `vllm`
(its own figures), `queue_store` (what waits) and `step_store` (steps).
"""
