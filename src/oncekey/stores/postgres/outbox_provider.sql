UPDATE idempotency_outbox SET provider_id = %(provider_id)s
WHERE id = %(id)s AND state = 'running' AND owner = %(owner)s
