-- One job, in the transaction of the request that adds it: the job exists if and only if that transaction commits.
-- It runs on connections of any driver: placeholders are :name, and CAST gives the types.
INSERT INTO idempotency_outbox (
    id, scope, key, key_owner, operation, task, payload, downstream_key, settles, run_at
) VALUES (
    CAST(:id AS text), CAST(:scope AS text), CAST(:key AS text), CAST(:key_owner AS text), CAST(:operation AS text),
    CAST(:task AS text), CAST(:payload AS text), CAST(:downstream_key AS text), CAST(:settles AS boolean),
    coalesce(to_timestamp(CAST(:run_at AS double precision)), clock_timestamp())
)
