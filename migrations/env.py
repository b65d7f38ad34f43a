"""What Alembic runs for each command. Knows how our history is applied; connection and transaction come from `run`."""

from alembic import context

from migrations.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite rolls tables back like rows, once the driver leaves transactions to us (`migrations.database`).
    transactional_ddl=True,
    render_as_batch=True,
    compare_server_default=True,
)
with context.begin_transaction():
    context.run_migrations()
