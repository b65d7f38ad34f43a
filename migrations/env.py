"""Apply the history: Alembic runs this for each command. Connection and transaction come from `run`."""

from alembic import context

from migrations.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite rolls back table changes like rows, because we control the driver's transactions
    # (`whetstone.database.engine`).
    transactional_ddl=True,
    render_as_batch=True,
    compare_server_default=True,
)
with context.begin_transaction():
    context.run_migrations()
