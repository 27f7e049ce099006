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
