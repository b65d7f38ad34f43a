"""Read and check the settings.

`settings` joins its parts: `proxy` (and vLLM), `trainer`, `training_service`, `launcher`, `adapters`, `gate`,
`rewards`, `teachers`, `privacy`, `spending`.
`secret_files` reads secrets from files. `settings_file` writes a file with a comment on each setting.
"""
