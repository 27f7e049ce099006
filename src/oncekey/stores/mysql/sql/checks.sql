-- What `oncekey doctor` asks the database.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: probe_clock
SELECT timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))

-- name: probe_connections
-- How many connections the server takes, and how many there are. 0 means no limit for this user.
SELECT @@max_connections, @@max_user_connections

-- name: probe_connected
SHOW STATUS LIKE 'Threads_connected'

-- name: probe_indexes
SELECT DISTINCT index_name FROM information_schema.statistics
WHERE table_schema = database() AND table_name LIKE 'idempotency\_%'

-- name: probe_engines
-- The tables of this database that a rollback does not undo.
SELECT t.table_name, t.engine
FROM information_schema.tables AS t
INNER JOIN information_schema.engines AS e ON t.engine = e.engine
WHERE t.table_schema = database() AND t.table_type = 'BASE TABLE' AND e.transactions = 'NO'
ORDER BY t.table_name LIMIT 6

-- name: probe_settings
-- The settings that decide whether a commit survives a crash, what a transaction sees, and how long a packet may be. The
-- isolation is that of the app's connections: oncekey's own are READ COMMITTED.
SHOW GLOBAL VARIABLES WHERE variable_name IN (
    'innodb_flush_log_at_trx_commit', 'sync_binlog', 'log_bin', 'innodb_doublewrite', 'tx_isolation',
    'transaction_isolation', 'max_allowed_packet', 'read_only', 'wsrep_on', 'wsrep_cluster_address'
)

-- name: probe_times
-- How long the newest first attempts took, and how long their leases were. Keys that ended after their lease are left
-- out: a worker or the reconciler ended them, so their time is not a handler's.
SELECT
    k.operation,
    timestampdiff(MICROSECOND, k.created_at, k.finished_at) / 1000000e0,
    timestampdiff(MICROSECOND, k.created_at, k.lease_until) / 1000000e0
FROM (
    SELECT n.operation, n.created_at, n.finished_at, n.lease_until, n.attempt
    FROM idempotency_keys AS n FORCE INDEX (idempotency_keys_due)
    WHERE n.duty = 'over'
    ORDER BY n.due_at DESC
    LIMIT :limit
) AS k
WHERE
    k.attempt = 1 AND k.finished_at <= k.lease_until

-- name: identity
-- What no other database has: when its tables were made, and its name. A restored copy has another time of its table.
SELECT
    (SELECT min(m.applied_at) FROM oncekey_schema AS m),
    database(),
    (SELECT t.create_time FROM information_schema.tables AS t
     WHERE t.table_schema = database() AND t.table_name = 'idempotency_keys')
