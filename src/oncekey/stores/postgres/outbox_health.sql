SELECT
    (
        SELECT count(*)
        FROM (SELECT FROM idempotency_outbox WHERE state = 'ready' AND run_at <= now() LIMIT {counted}) AS r
    ),
    coalesce(date_part('epoch', now() - (
        SELECT run_at FROM idempotency_outbox
        WHERE state = 'ready' AND run_at <= now()
        ORDER BY run_at
        LIMIT 1
    )), 0),
    (SELECT count(*) FROM (SELECT FROM idempotency_outbox WHERE state = 'dead' LIMIT {counted}) AS d)
