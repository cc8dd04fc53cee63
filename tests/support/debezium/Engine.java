import com.fasterxml.jackson.databind.ObjectMapper;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.io.FileReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Properties;

/** Runs Debezium's engine and prints each record as a line of JSON. It ends when its standard input does. */
public class Engine {
    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        try (FileReader reader = new FileReader(arguments[0], StandardCharsets.UTF_8)) {
            properties.load(reader);
        }
        ObjectMapper mapper = new ObjectMapper();
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        DebeziumEngine<ChangeEvent<String, String>> engine = DebeziumEngine.create(Json.class)
                .using(properties)
                .notifying(event -> out.println(line(mapper, event)))
                .using((success, message, error) -> {
                    if (!success) {
                        System.err.println(message);
                        if (error != null) {
                            error.printStackTrace();
                        }
                        System.exit(1);
                    }
                })
                .build();
        Thread thread = new Thread(engine);
        thread.start();
        while (System.in.read() >= 0) {
        }
        engine.close();
        thread.join();
        System.exit(0);
    }

    private static String line(ObjectMapper mapper, ChangeEvent<String, String> event) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("topic", event.destination());
        line.put("key", event.key());
        line.put("value", event.value());
        try {
            return mapper.writeValueAsString(line);
        }
        catch (Exception error) {
            throw new RuntimeException(error);
        }
    }
}
