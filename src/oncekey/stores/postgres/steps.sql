-- The steps of each of these keys, in the order in which they were first written.
SELECT w.place, s.name, s.kind, s.state, s.repeatable, s.result, s.downstream_key, s.provider_id
FROM unnest(%(scope)s, %(key)s) WITH ORDINALITY AS w (scope, key, place)
CROSS JOIN LATERAL (
    SELECT * FROM idempotency_steps AS i WHERE i.scope = w.scope AND i.key = w.key OFFSET 0
) AS s
ORDER BY w.place, s.number
