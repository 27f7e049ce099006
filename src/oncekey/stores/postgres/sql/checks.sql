-- What `oncekey doctor` asks the database.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: probe_connections
-- How many connections this role can have, and how many there are. -1 means no limit.
SELECT
    current_setting('max_connections')::integer
    - current_setting('superuser_reserved_connections')::integer
    - coalesce(current_setting('reserved_connections', true), '0')::integer,
    (SELECT sum(s.numbackends) FROM pg_stat_database AS s),
    (SELECT d.datconnlimit FROM pg_database AS d WHERE d.datname = current_database()),
    (SELECT s.numbackends FROM pg_stat_database AS s WHERE s.datname = current_database()),
    (SELECT r.rolconnlimit FROM pg_roles AS r WHERE r.rolname = current_user),
    (SELECT count(*) FROM pg_stat_activity AS a WHERE a.usename = current_user)

-- name: probe_indexes
-- The indexes of oncekey's tables, and whether each is valid: a failed CREATE INDEX CONCURRENTLY leaves an invalid one.
SELECT i.relname, x.indisvalid AND x.indisready
FROM pg_index AS x
INNER JOIN pg_class AS i ON x.indexrelid = i.oid
WHERE x.indrelid IN (
    to_regclass('idempotency_keys'), to_regclass('idempotency_steps'), to_regclass('idempotency_outbox'),
    to_regclass('idempotency_audit')
)

-- name: probe_settings
-- The settings that decide whether a commit survives a crash. reset_val is the setting of the server, the database and
-- the role; oncekey's own connections switch synchronous_commit on.
SELECT name, reset_val FROM pg_settings
WHERE name IN ('synchronous_commit', 'fsync', 'full_page_writes')
UNION ALL
SELECT 'standby', pg_is_in_recovery()::text

-- name: probe_times
-- How long the newest first attempts took, and how long their leases were. Keys that ended after their lease are left
-- out: a worker or the reconciler ended them, so their time is not a handler's.
SELECT
    k.operation,
    date_part('epoch', k.finished_at - k.created_at),
    date_part('epoch', k.lease_until - k.created_at)
FROM (
    SELECT n.* FROM idempotency_keys AS n
    WHERE n.state IN ('completed', 'failed') OR (n.state = 'failed_retryable' AND n.recovery_point IS NULL)
    ORDER BY n.expires_at DESC
    LIMIT %(limit)s
) AS k
WHERE
    k.attempt = 1 AND k.finished_at <= k.lease_until

-- name: identity
-- What no other database has: when its tables were made, its name, and ids that a restored copy does not keep.
SELECT
    (SELECT min(m.applied_at)::text FROM oncekey_schema AS m),
    current_database()::text,
    (SELECT d.oid::bigint FROM pg_database AS d WHERE d.datname = current_database()),
    to_regclass('idempotency_keys')::oid::bigint
