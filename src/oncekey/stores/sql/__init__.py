"""What the SQL stores share: named queries, migrations, rows of the outbox, checks of the doctor."""
