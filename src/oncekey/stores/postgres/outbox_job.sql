SELECT {columns} FROM idempotency_outbox AS j WHERE j.id = %(id)s
