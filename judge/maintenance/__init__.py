"""Keep the tables small and the dashboards fast: `retention`, and `rollups` with `rollup_store`."""
