"""The errors of what all programs share, and of the command line, as one tree.

WhetstoneError
├── SettingsError         the settings, or the file of a secret, cannot be used
├── ModelUnreadable       (memory/model_files) the sizes of a model cannot be read
├── AdapterDamaged        (registry/adapters) a file of an adapter is missing or differs from the manifest
├── NotCopied             (registry/adapters) an adapter's folder was not copied
├── StoreError            (registry/adapters) an adapter cannot be had from its store, or not be put there
│   ├── StoreUnreachable  the store, or the puller beside vLLM, cannot be reached
│   └── NotPublished      the store does not have the whole adapter
├── LedgerError           (registry/versions) the move is not possible with these versions
├── UnknownPolicy         (registry/projects) the project has no policy of that name
├── VllmError             (vllm/client) a call to vLLM failed
│   ├── VllmDown          it cannot be reached
│   └── VllmRefused       it answered with an error, or with something unreadable
├── ModelNotFetched       (models/download) a base model cannot be fetched or converted
├── StartFailed           (stack/supervisor) a part of the stack did not start
├── StackNotRunning       (stack/admin_client) no stack runs
├── ProxyUnreachable      (stack/admin_client) a stack runs, but its proxy could not be called
├── RefusedByProxy        (stack/admin_client) the proxy refused, or it is unknown whether it did the work
├── NothingToTest         (doctor/vllm_checks) no vLLM serves the policy's model, or no test is stored
├── AppFailed             (demo/agent_process) the app ended without a report
├── FilterRefused         (transfer/exporting/exporter) the database rejects the filter, or is unavailable
├── CannotWrite           (transfer/exporting/files) the file of an export cannot be written
├── NotTabular            (transfer/exporting/files) a message does not fit Parquet's columns
├── InvalidLog            (transfer/importing/importer) the log cannot be imported
├── BadLine               (transfer/importing/schema) a line of the log is invalid
├── NoAnswer              (transfer/importing/schema) a logged call has no answer
├── NotImportable         (transfer/importing/store) the policy serves apps, so no log can be imported into it
├── BackupError           (backup/archive) a backup cannot be made or restored
├── PageMissing           (cli/commands/docs) the documentation has no such page
├── QueryFailed           (cli/tables/sql_query) a query of `whetstone sql` failed
└── NotFound              (cli/tables/trajectory_store) no trajectory or group has this id
"""


class WhetstoneError(Exception):
    """What was requested cannot be done; the message gives the cause and the remedy."""

    exit_code = 2
    """Exit code of the command line: 1 if the command was refused, 2 if it could not begin."""


class SettingsError(WhetstoneError):
    """The settings cannot be used; the message names the setting, the reason and a valid value."""
