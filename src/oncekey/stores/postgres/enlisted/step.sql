-- Store a phase, in the transaction that did its work.
INSERT INTO idempotency_steps (scope, key, name, kind, state, repeatable, result)
SELECT
    CAST(:scope AS text), CAST(:key AS text), CAST(:name AS text), CAST(:kind AS text), 'done', true,
    CAST(:result AS text)
WHERE current_setting('oncekey.owner', true) = CAST(:owner AS text)
ON CONFLICT (scope, key, name) DO UPDATE SET
    kind = excluded.kind,
    state = excluded.state,
    repeatable = excluded.repeatable,
    result = excluded.result
