-- The steps of moved rows whose past no longer counts. Under the row's lock nobody else writes them.
-- LATERAL with OFFSET 0: see held.sql.
forgotten AS (
    DELETE FROM idempotency_steps AS s
    USING (SELECT scope, key FROM moved WHERE forgets) AS m
    CROSS JOIN LATERAL (
        SELECT i.tableoid AS part, i.ctid AS place
        FROM idempotency_steps AS i
        WHERE i.scope = m.scope AND i.key = m.key
        OFFSET 0
    ) AS p
    WHERE s.ctid = p.place AND s.tableoid IS NOT DISTINCT FROM p.part
)
