-- Delete the steps of moved rows that are deleted, expire or start over. The row's lock keeps other writers away.
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
