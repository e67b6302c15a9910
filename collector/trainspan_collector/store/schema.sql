-- Tables (schema `stored`, private) and views (schema `main`, the reading surface of trainspan_schemas/views.py).
-- Ids are lower-case hex, and times are nanoseconds since the epoch. The columns `*_json`, attributes, resource, events,
-- links and body are JSON text that keeps types.
-- A row without `seq` is empty: it only fills its row group (see row_groups.py).
-- It can also be run on an existing store: columns added by migrations.py are at the end of their table.

-- `schema_version`; `epoch`: a random name, another one whenever rows are deleted (see key_index.py).
CREATE TABLE IF NOT EXISTS meta (key VARCHAR, value VARCHAR);

CREATE SCHEMA IF NOT EXISTS stored;

-- One row: how far the journal is loaded, and the last `seq` given out. Written in the transaction of the rows.
CREATE TABLE IF NOT EXISTS stored.progress (segment BIGINT, byte_offset BIGINT, last_seq BIGINT);
INSERT INTO stored.progress SELECT 0, 0, 0 WHERE NOT EXISTS (FROM stored.progress);

-- `seq` of the rows that a richer duplicate replaced, and `seq` of that duplicate.
CREATE TABLE IF NOT EXISTS stored.superseded (seq BIGINT, by_seq BIGINT);

CREATE TABLE IF NOT EXISTS stored.spans (
    seq BIGINT,
    span_key UBIGINT,            -- the span id as a number
    richness BIGINT,             -- of two spans with the same ids, the one with the greater value is kept
    trace_id VARCHAR,
    span_id VARCHAR,
    parent_span_id VARCHAR,
    name VARCHAR,
    kind INTEGER,
    start_ns BIGINT,
    end_ns BIGINT,
    status_code INTEGER,
    status_message VARCHAR,
    service_name VARCHAR,
    scope_name VARCHAR,
    scope_json VARCHAR,          -- version, attributes, schema URLs, dropped counts: omitted by the view
    attributes VARCHAR USING COMPRESSION zstd,
    resource VARCHAR,
    events VARCHAR USING COMPRESSION zstd,
    links VARCHAR,
    trace_state VARCHAR,
    flags BIGINT,
    dropped_attributes BIGINT,
    dropped_events BIGINT,
    dropped_links BIGINT,
    rollout_id VARCHAR,          -- promoted attributes from here on
    attempt INTEGER,
    task_id VARCHAR,
    run_id VARCHAR,
    round INTEGER,
    split VARCHAR,
    agent VARCHAR,
    rollout_status VARCHAR,      -- not NULL: the span is a rollout span
    rollout_boundary VARCHAR,
    rollout_judge VARCHAR,
    rollout_calls INTEGER,
    is_call BOOLEAN,             -- carries token ids
    call_index INTEGER,
    policy_name VARCHAR,
    policy_version INTEGER,
    prompt_ids INTEGER[],
    completion_ids INTEGER[],
    logprobs FLOAT[],
    finish_reason VARCHAR,
    delivered BOOLEAN,
    untrusted BOOLEAN,           -- its sender may not state this (see journal/trust.py)
    received_ns BIGINT,          -- when the collector received it; determines its age
    operation VARCHAR,           -- from here on: attributes that readers query, see rows/promoted.py
    request_model VARCHAR,
    response_id VARCHAR,
    state_key VARCHAR,
    policy_version_spans VARCHAR,
    redacted VARCHAR,
    call_facts VARCHAR,
    attribute_keys VARCHAR,
    own_reward BOOLEAN           -- on a rollout span: the runner leaves the reward to the agent
);

CREATE TABLE IF NOT EXISTS stored.logs (
    seq BIGINT,
    content_hash BLOB,
    time_ns BIGINT,
    observed_ns BIGINT,
    trace_id VARCHAR,
    span_id VARCHAR,
    event_name VARCHAR,
    severity INTEGER,
    severity_text VARCHAR,
    body VARCHAR USING COMPRESSION zstd,
    attributes VARCHAR USING COMPRESSION zstd,
    resource VARCHAR,
    scope_json VARCHAR,
    flags BIGINT,
    dropped_attributes BIGINT,
    rollout_id VARCHAR,
    received_ns BIGINT,
    untrusted BOOLEAN
);

CREATE TABLE IF NOT EXISTS stored.evaluations (
    seq BIGINT,
    key BLOB,                    -- hash of the evaluation id, else of the content; unique except for superseded rows
    on_span BOOLEAN,             -- it is a span event, else a log record
    trace_id VARCHAR,
    span_id VARCHAR,
    rollout_id VARCHAR,          -- its own attribute, else its span's
    attempt INTEGER,
    name VARCHAR,
    score DOUBLE,
    label VARCHAR,
    explanation VARCHAR,
    source VARCHAR,
    of_item VARCHAR,             -- trainspan.evaluation.of
    time_ns BIGINT,
    untrusted BOOLEAN,
    received_ns BIGINT
);

CREATE OR REPLACE VIEW stored.live_spans AS
SELECT * FROM stored.spans s ANTI JOIN stored.superseded d ON d.seq = s.seq WHERE s.seq IS NOT NULL;

CREATE OR REPLACE VIEW stored.live_evaluations AS
SELECT * FROM stored.evaluations e ANTI JOIN stored.superseded d ON d.seq = e.seq WHERE e.seq IS NOT NULL;

-- The rollout of each trace with exactly one (rollout, attempt): it is assigned to spans that arrived without identity.
CREATE OR REPLACE VIEW stored.trace_rollouts AS
SELECT trace_id, min(rollout_id) AS rollout_id, min(attempt) AS attempt
FROM stored.live_spans
WHERE rollout_id IS NOT NULL
GROUP BY trace_id
HAVING count(DISTINCT (rollout_id, attempt)) = 1;

-- The identity of each rollout, from its spans: trusted ones first, and among them the rollout span.
CREATE OR REPLACE VIEW stored.rollout_identities AS
SELECT
    rollout_id,
    attempt,
    first(task_id ORDER BY untrusted, rollout_status IS NULL, seq) FILTER (task_id IS NOT NULL) AS task_id,
    first(run_id ORDER BY untrusted, rollout_status IS NULL, seq) FILTER (run_id IS NOT NULL) AS run_id,
    first(round ORDER BY untrusted, rollout_status IS NULL, seq) FILTER (round IS NOT NULL) AS round,
    first(split ORDER BY untrusted, rollout_status IS NULL, seq) FILTER (split IS NOT NULL) AS split,
    sum(rollout_calls) FILTER (rollout_status IS NULL) AS process_calls
FROM stored.live_spans
WHERE rollout_id IS NOT NULL
GROUP BY rollout_id, attempt;

-- Every span with its rollout: its own identity, else its trace's, completed with the rollout's.
CREATE OR REPLACE VIEW stored.span_identities AS
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

CREATE OR REPLACE VIEW spans AS
SELECT
    seq, trace_id, span_id, parent_span_id, name, kind, start_ns, end_ns, status_code, status_message, service_name,
    scope_name, attributes, resource, events, links, trace_state, flags, dropped_attributes, dropped_events,
    dropped_links, untrusted
FROM stored.live_spans;

CREATE OR REPLACE VIEW logs AS
SELECT seq, time_ns, trace_id, span_id, event_name, severity, body, attributes, resource, untrusted
FROM stored.logs
WHERE seq IS NOT NULL;

CREATE OR REPLACE VIEW calls AS
SELECT
    i.seq, i.trace_id, i.span_id, i.rollout_id, i.attempt, i.task_id, i.run_id, i.round, i.split, s.agent, s.call_index,
    s.policy_name, s.policy_version, s.prompt_ids, s.completion_ids, s.logprobs, s.finish_reason, s.delivered,
    s.start_ns, s.end_ns, s.untrusted
FROM (FROM stored.spans WHERE is_call) s
JOIN stored.span_identities i ON i.seq = s.seq;

-- Each evaluation with its rollout: by its own attribute, else its span's, else its trace's.
CREATE OR REPLACE VIEW stored.bound_evaluations AS
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
    CASE
        WHEN e.of_item IS NOT NULL THEN e.of_item = 'rollout'
        ELSE e.span_id IS NULL
            OR (NOT e.on_span AND e.rollout_id IS NOT NULL)
            OR coalesce(p.rollout_status IS NOT NULL OR p.rollout_boundary IS NOT NULL OR p.rollout_calls IS NOT NULL, false)
    END AS of_rollout
FROM stored.live_evaluations e
LEFT JOIN (
    FROM stored.live_spans WHERE span_id IN (SELECT span_id FROM stored.live_evaluations WHERE span_id IS NOT NULL)
) p ON p.trace_id = e.trace_id AND p.span_id = e.span_id
LEFT JOIN stored.trace_rollouts t ON t.trace_id = e.trace_id AND e.rollout_id IS NULL;

-- Each log record with its rollout: by its own attribute, else its trace's.
CREATE OR REPLACE VIEW stored.log_rollouts AS
SELECT l.seq, l.trace_id, coalesce(l.rollout_id, t.rollout_id) AS rollout_id
FROM stored.logs l
LEFT JOIN stored.trace_rollouts t ON t.trace_id = l.trace_id AND l.rollout_id IS NULL
WHERE l.seq IS NOT NULL;

CREATE OR REPLACE VIEW evaluations AS
SELECT seq, trace_id, span_id, rollout_id, name, score, label, explanation, source, time_ns, untrusted
FROM stored.bound_evaluations;

-- One row per (rollout, attempt): its rollout span, a trusted one first, the runner's before the agent's own.
CREATE OR REPLACE VIEW rollouts AS
WITH rollout_spans AS (
    SELECT *
    FROM stored.live_spans
    WHERE rollout_status IS NOT NULL AND rollout_id IS NOT NULL
    QUALIFY row_number() OVER (
        PARTITION BY rollout_id, attempt
        ORDER BY untrusted, coalesce(list_position(['runner', 'explicit', 'request', 'process'], rollout_boundary), 5), seq
    ) = 1
),
rewards AS (
    SELECT r.seq, sum(e.score ORDER BY e.score) AS reward
    FROM rollout_spans r
    JOIN stored.bound_evaluations e ON e.rollout_id = r.rollout_id
    WHERE e.name = 'reward'
        -- From an agent: only evaluations in its rollout's trace, if the runner leaves the reward to the agent.
        AND (
            NOT e.untrusted
            OR NOT r.untrusted AND r.rollout_judge IS NULL AND e.trace_id = r.trace_id
                AND coalesce(r.own_reward, false)
        )
        AND coalesce(
            e.attempt, (SELECT max(later.attempt) FROM rollout_spans later WHERE later.rollout_id = e.rollout_id)
        ) = r.attempt
        AND CASE
            WHEN r.rollout_judge IS NULL THEN e.of_rollout
            ELSE e.source = 'judge' AND e.on_span AND e.trace_id = r.trace_id AND e.span_id = r.span_id
        END
    GROUP BY r.seq
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
    w.reward,
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
LEFT JOIN rewards w ON w.seq = r.seq;
