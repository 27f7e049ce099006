-- The columns of columns.sql with the key of a row that was just inserted, and the time.
SELECT
    k.scope, k.key, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, date_part('epoch', now()), NULL, NULL
FROM fresh AS k
