"""Say how the proxy is, for Prometheus.

`exposition` writes `/metrics` from `traffic` (calls), `rejections`, `vllm` (its own figures, and whether all tokens are
recorded), `clock` (whether it jumped) and `store` (what waits, and the steps). `patient_reader` reads
the database also while it hangs.
"""
