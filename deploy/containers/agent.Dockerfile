# Your agent, on trainspan's image. AGENT is a folder of the build context with agent.py, judge.py, tasks.jsonl and
# requirements.txt:
#
#   docker build -f deploy/containers/agent.Dockerfile --build-arg AGENT=my-agent -t my-agent .
ARG TRAINSPAN_IMAGE=trainspan-agent:0.1.0
# hadolint ignore=DL3006
FROM ${TRAINSPAN_IMAGE}
ARG AGENT
# hadolint ignore=DL3002
USER 0:0
COPY ${AGENT} /agent
RUN pip install --no-cache-dir --requirement /agent/requirements.txt
USER 10001:10001
WORKDIR /agent
CMD ["trainspan", "rollout", "--tasks", "tasks.jsonl", "--judge", "judge.py:score", "agent.py:solve"]
