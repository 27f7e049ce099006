-- The last statement of a phase sets the recovery point and a new lease. 0 rows: the phase ended its own transaction.
UPDATE idempotency_keys AS k SET
    recovery_point = CAST(:name AS text),
    lease_until = clock_timestamp() + CAST(:lease_seconds AS double precision) * interval '1 second'
WHERE
    k.scope = CAST(:scope AS text) AND k.key = CAST(:key AS text) AND k.owner = CAST(:owner AS text)
    AND k.state = 'in_progress' AND current_setting('oncekey.owner', true) = CAST(:owner AS text)
RETURNING date_part('epoch', k.lease_until)
