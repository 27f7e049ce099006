-- The rows that an operator asks for, in the order of their keys. The state is part of the text, so that PostgreSQL can
-- use its partial index. If the state has one, MATERIALIZED keeps the planner from reading all keys in their order.
WITH asked AS {materialized} (
    SELECT k.* FROM idempotency_keys AS k
    WHERE
        {state}
        AND {scope}
        AND (k.scope, k.key) > (%(after_scope)s, %(after_key)s)
        AND (%(operation)s::text IS NULL OR k.operation = %(operation)s)
        AND (
            %(older_than)s::double precision IS NULL
            OR k.created_at <= now() - %(older_than)s::double precision * interval '1 second'
        )
)

SELECT {columns} FROM asked AS k
ORDER BY k.scope, k.key
LIMIT %(limit)s
