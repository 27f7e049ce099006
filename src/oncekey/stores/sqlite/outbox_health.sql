SELECT
    (SELECT count(*) FROM (SELECT 1 FROM idempotency_outbox WHERE state = 'ready' AND run_at <= ?1 LIMIT ?2)),
    (SELECT ?1 - run_at FROM idempotency_outbox WHERE state = 'ready' AND run_at <= ?1 ORDER BY run_at LIMIT 1),
    (SELECT count(*) FROM (SELECT 1 FROM idempotency_outbox WHERE state = 'dead' LIMIT ?2))
