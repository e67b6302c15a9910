-- Tables (schema `stored`, private) and views (schema `main`, the reading surface of trainspan_schemas/store/views.py).
-- The placeholders are the tables with the columns of trainspan_schemas/store/tables.py, and the columns of the public views.
-- A row without `seq` is empty: it only fills its row group (see row_groups.py).

-- `schema_version`; `epoch`: a random name, another one whenever rows are deleted (see key_index.py).
CREATE TABLE meta (key VARCHAR, value VARCHAR);

CREATE SCHEMA stored;

-- One row: how far the journal is loaded, and the last `seq` given out. Written in the transaction of the rows.
CREATE TABLE stored.progress (segment BIGINT, byte_offset BIGINT, last_seq BIGINT);
INSERT INTO stored.progress VALUES (0, 0, 0);

-- `seq` of the rows that a richer duplicate replaced, and `seq` of that duplicate.
CREATE TABLE stored.superseded (seq BIGINT, by_seq BIGINT);

-- spans, logs and evaluations, with the columns of their rows.
$tables

-- Where the rows of each trace and rollout are (see insert.py).
$places;

CREATE VIEW stored.live_spans AS
SELECT * FROM stored.spans s ANTI JOIN stored.superseded d ON d.seq = s.seq WHERE s.seq IS NOT NULL;

CREATE VIEW stored.live_logs AS
SELECT * FROM stored.logs WHERE seq IS NOT NULL;

CREATE VIEW stored.live_evaluations AS
SELECT * FROM stored.evaluations e ANTI JOIN stored.superseded d ON d.seq = e.seq WHERE e.seq IS NOT NULL;

-- The spans that state a rollout, with their standing: 2 the runner's own span, 1 trusted, 0 untrusted. Those of less standing than
-- another one of their trace or of their attempt decide nothing there.
CREATE VIEW stored.statements AS
SELECT
    seq, trace_id, rollout_id, attempt, task_id, run_id, round, split, untrusted, rollout_status, rollout_calls,
    CASE
        WHEN untrusted THEN 0
        WHEN rollout_status IS NOT NULL AND rollout_boundary = 'runner' THEN 2
        ELSE 1
    END AS standing
FROM stored.live_spans
WHERE rollout_id IS NOT NULL;

-- The rollout of each trace with exactly one (rollout, attempt): it is assigned to spans that arrived without identity.
CREATE VIEW stored.trace_rollouts AS
SELECT trace_id, min(rollout_id) AS rollout_id, min(attempt) AS attempt
FROM stored.statements
SEMI JOIN (SELECT trace_id, max(standing) AS standing FROM stored.statements GROUP BY trace_id) USING (trace_id, standing)
GROUP BY trace_id
HAVING count(DISTINCT (rollout_id, attempt)) = 1;

-- The identity of each attempt, from its spans of the greatest standing, the rollout span first.
CREATE VIEW stored.rollout_identities AS
SELECT
    s.rollout_id,
    s.attempt,
    b.standing,
    first(task_id ORDER BY rollout_status IS NULL, seq) FILTER (task_id IS NOT NULL AND s.standing = b.standing) AS task_id,
    first(run_id ORDER BY rollout_status IS NULL, seq) FILTER (run_id IS NOT NULL AND s.standing = b.standing) AS run_id,
    first(round ORDER BY rollout_status IS NULL, seq) FILTER (round IS NOT NULL AND s.standing = b.standing) AS round,
    first(split ORDER BY rollout_status IS NULL, seq) FILTER (split IS NOT NULL AND s.standing = b.standing) AS split,
    sum(rollout_calls) FILTER (rollout_status IS NULL AND (s.standing > 0 OR b.standing = 0)) AS process_calls
FROM stored.statements s
JOIN (SELECT rollout_id, attempt, max(standing) AS standing FROM stored.statements GROUP BY rollout_id, attempt) b
    ON b.rollout_id = s.rollout_id AND b.attempt = s.attempt
GROUP BY s.rollout_id, s.attempt, b.standing;

-- Every span with its rollout: its own identity, else its trace's, completed with the rollout's.
CREATE VIEW stored.span_identities AS
SELECT
    s.seq,
    s.trace_id,
    s.span_id,
    s.is_call,
    coalesce(s.rollout_id, t.rollout_id) AS rollout_id,
    coalesce(s.attempt, t.attempt) AS attempt,
    coalesce(s.task_id, i.task_id) AS task_id,
    coalesce(s.run_id, i.run_id) AS run_id,
    coalesce(s.round, i.round) AS round,
    coalesce(s.split, i.split) AS split
FROM stored.live_spans s
LEFT JOIN stored.trace_rollouts t ON t.trace_id = s.trace_id AND s.rollout_id IS NULL
LEFT JOIN stored.rollout_identities i
    ON i.rollout_id = coalesce(s.rollout_id, t.rollout_id) AND i.attempt = coalesce(s.attempt, t.attempt);

CREATE VIEW spans AS
SELECT $spans
FROM stored.live_spans s
LEFT JOIN stored.trace_rollouts t ON t.trace_id = s.trace_id AND s.rollout_id IS NULL;

CREATE VIEW logs AS
SELECT $logs
FROM stored.live_logs s
LEFT JOIN stored.trace_rollouts t ON t.trace_id = s.trace_id AND s.rollout_id IS NULL;

CREATE VIEW calls AS
SELECT $calls
FROM (FROM stored.spans WHERE is_call) s
JOIN stored.span_identities i ON i.seq = s.seq;

-- Each evaluation with its rollout: by its own attribute, else its span's, else its trace's.
CREATE VIEW stored.bound_evaluations AS
SELECT
    e.seq,
    e.trace_id,
    e.span_id,
    coalesce(e.rollout_id, p.rollout_id, t.rollout_id) AS rollout_id,
    coalesce(e.attempt, CASE WHEN e.rollout_id IS NULL THEN p.attempt END, t.attempt) AS attempt,
    e.name,
    e.score,
    e.label,
    e.explanation,
    coalesce(e.source, 'agent') AS source,
    e.time_ns,
    e.untrusted,
    e.on_span,
    e.of_item AS "of",
    e.last_call,
    e.about_response,
    CASE
        WHEN e.of_item IS NOT NULL THEN e.of_item = 'rollout'
        ELSE e.span_id IS NULL
            OR (NOT e.on_span AND e.rollout_id IS NOT NULL)
            OR coalesce(p.rollout_status IS NOT NULL OR p.rollout_boundary IS NOT NULL OR p.rollout_calls IS NOT NULL, false)
    END AS of_rollout,
    -- Of the rollout's own span that it is on.
    CASE WHEN p.rollout_status IS NOT NULL THEN coalesce(p.rollout_boundary, '') END AS own_boundary
FROM stored.live_evaluations e
LEFT JOIN (
    FROM stored.live_spans
    WHERE span_id IN (SELECT span_id FROM stored.live_evaluations WHERE span_id IS NOT NULL) AND collides IS NULL
) p ON p.trace_id = e.trace_id AND p.span_id = e.span_id
LEFT JOIN stored.trace_rollouts t ON t.trace_id = e.trace_id AND e.rollout_id IS NULL;

-- Each log record with its rollout: by its own attribute, else its trace's.
CREATE VIEW stored.log_rollouts AS
SELECT l.seq, l.trace_id, coalesce(l.rollout_id, t.rollout_id) AS rollout_id
FROM stored.logs l
LEFT JOIN stored.trace_rollouts t ON t.trace_id = l.trace_id AND l.rollout_id IS NULL
WHERE l.seq IS NOT NULL;

CREATE VIEW evaluations AS
SELECT $evaluations
FROM stored.bound_evaluations;

-- One row per (rollout, attempt): its rollout span, a trusted one first, the runner's before the agent's own.
CREATE VIEW rollouts AS
WITH rollout_spans AS (
    SELECT *
    FROM stored.live_spans
    WHERE rollout_status IS NOT NULL AND rollout_id IS NOT NULL
    QUALIFY row_number() OVER (
        PARTITION BY rollout_id, attempt
        ORDER BY untrusted, coalesce(list_position(['runner', 'explicit', 'request', 'process'], rollout_boundary), 5), seq
    ) = 1
),
last_attempts AS (
    SELECT rollout_id, coalesce(max(attempt) FILTER (NOT untrusted), max(attempt)) AS attempt
    FROM rollout_spans
    GROUP BY rollout_id
),
rewards AS (
    SELECT r.seq, sum(e.score ORDER BY e.score) AS reward
    FROM rollout_spans r
    JOIN stored.bound_evaluations e ON e.rollout_id = r.rollout_id
    JOIN last_attempts l ON l.rollout_id = r.rollout_id
    WHERE e.name = 'reward'
        AND coalesce(e.source, '') <> 'label'
        -- From an agent: only evaluations in its rollout's trace, if the runner leaves the reward to the agent.
        AND (
            NOT e.untrusted
            OR NOT r.untrusted AND r.rollout_judge IS NULL AND e.trace_id = r.trace_id
                AND coalesce(r.own_reward, false)
        )
        AND coalesce(e.attempt, l.attempt) = r.attempt
        -- Two runs with one id and attempt are no sum.
        AND NOT coalesce(
            e.own_boundary = coalesce(r.rollout_boundary, '') AND (e.trace_id <> r.trace_id OR e.span_id <> r.span_id), false
        )
        AND CASE
            WHEN r.rollout_judge IS NULL THEN e.of_rollout
            ELSE e.source = 'judge' AND e.on_span AND e.trace_id = r.trace_id AND e.span_id = r.span_id
        END
    GROUP BY r.seq
),
-- The newest label of each attempt, also if it is withdrawn (a NULL score).
labels AS (
    SELECT e.rollout_id, e.attempt, e.score
    FROM stored.live_evaluations e
    WHERE e.source = 'label' AND e.name = 'label' AND e.span_id IS NULL AND NOT e.untrusted
    QUALIFY row_number() OVER (
        PARTITION BY e.rollout_id, e.attempt ORDER BY e.time_ns DESC, e.score DESC NULLS LAST
    ) = 1
)
SELECT
    r.rollout_id,
    r.attempt,
    r.trace_id,
    i.task_id,
    i.run_id,
    i.round,
    i.split,
    r.rollout_status AS status,
    coalesce(b.score, w.reward) AS reward,
    -- A runner counts the calls of all processes; any other rollout span only those of its own process.
    CASE
        WHEN r.rollout_calls IS NULL OR i.process_calls IS NULL THEN coalesce(r.rollout_calls, i.process_calls)
        WHEN r.rollout_boundary = 'runner' THEN r.rollout_calls
        ELSE r.rollout_calls + i.process_calls
    END::INTEGER AS n_calls,
    r.start_ns,
    r.end_ns,
    r.untrusted
FROM rollout_spans r
LEFT JOIN stored.rollout_identities i ON i.rollout_id = r.rollout_id AND i.attempt = r.attempt
LEFT JOIN rewards w ON w.seq = r.seq
LEFT JOIN labels b ON b.rollout_id = r.rollout_id AND b.attempt = r.attempt;
