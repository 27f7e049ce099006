SELECT {columns} FROM idempotency_outbox WHERE id = ?1
